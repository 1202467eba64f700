# What the node really runs must be the target: every GPU by nvidia-smi, and the kernel module by /proc and /sys.
set -eu
target=${PITCREW_TARGET_VERSION:-}
if [ -z "$target" ]; then
    echo "The target version is not known (the driver image's tag does not tell it), so there is nothing to compare with." >&2
    exit 75
fi
# 535.104.05 is 535.104.5, and 550.142 is 550.142.0.
plain() { printf '%s\n' "$1" | sed -e 's/\.0*\([0-9]\)/.\1/g' -e ':a' -e 's/\.0$//' -e 'ta'; }
wrong=0
compare() {
    echo "$1: $2"
    if [ "$(plain "$2")" != "$(plain "$target")" ]; then
        echo "$1 is $2, not $target" >&2
        wrong=1
    fi
}
module=${PITCREW_DRIVER:-gpu}
gpus=0
case "$module" in
gpu)
    module=nvidia
    versions=$(smi --query-gpu=driver_version --format=csv,noheader)
    for version in $versions; do
        compare "driver of GPU $gpus" "$version"
        gpus=$((gpus + 1))
    done
    if [ "$gpus" = 0 ]; then
        echo "nvidia-smi lists no GPU" >&2
        exit 1
    fi
    if [ -r "$host/proc/driver/nvidia/version" ]; then
        loaded=$(sed -n '1s/.*[^0-9.]\([0-9][0-9]*\.[0-9][0-9.]*\).*/\1/p' "$host/proc/driver/nvidia/version")
        compare "/proc/driver/nvidia/version" "$loaded"
    fi
    ;;
ofed) module=mlx5_core ;;
esac
if [ -r "$host/sys/module/$module/version" ]; then
    compare "/sys/module/$module/version" "$(cat "$host/sys/module/$module/version")"
elif [ "$gpus" = 0 ]; then
    echo "the kernel module $module is not loaded, or does not tell its version" >&2
    exit 1
fi
[ "$wrong" = 0 ]
echo "{\"gpus\": $gpus}" >"$out"
