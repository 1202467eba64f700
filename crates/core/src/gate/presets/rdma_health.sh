# RDMA ports and their rates, as ibstat reads them too. A port that nobody plugged in is down before and after.
set -eu
host=${PITCREW_HOST:-/host}
out=${PITCREW_OUTPUT:-/dev/termination-log}
ports=0 active=0 gbps=0
for port in "$host"/sys/class/infiniband/*/ports/*; do
    [ -r "$port/state" ] || continue
    ports=$((ports + 1))
    state=$(cat "$port/state")
    physical=$(cat "$port/phys_state")
    rate=$(cat "$port/rate")
    echo "${port#"$host"/sys/class/infiniband/}: state $state, physical state $physical, rate $rate"
    case "$state/$physical" in
    *": ACTIVE/"*": LinkUp")
        active=$((active + 1))
        rate=${rate%% *}
        gbps=$((gbps + ${rate%.*}))
        ;;
    esac
done
# Before the visit whatever is found is what there was; the node may be visited to mend it.
if [ "$active" = 0 ] && [ "${PITCREW_SAMPLE:-After}" = After ]; then
    echo "none of $ports RDMA ports is ACTIVE with its link up" >&2
    exit 1
fi
numbers="{\"ports\": $ports, \"active\": $active, \"gbps\": $gbps}"
echo "$numbers"
echo "$numbers" >"$out"
