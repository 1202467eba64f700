# One process for each GPU of each node. A node's rank is its place in the list; all meet at the first one's address.
set -eu
nodes=0 rank=
for node in $(printf '%s' "$PITCREW_NODES" | tr ',' ' '); do
    if [ "$node" = "$PITCREW_NODE" ]; then
        rank=$nodes
    fi
    nodes=$((nodes + 1))
done
if [ -z "$rank" ]; then
    echo "node $PITCREW_NODE is none of those under test ($PITCREW_NODES)" >&2
    exit 75
fi
if [ -z "${PITCREW_RANK0_ADDRESS:-}" ]; then
    echo "the address of the first node of $PITCREW_NODES is not known, so the others cannot find it" >&2
    exit 75
fi
script=$(mktemp)
printf '%s' "$PITCREW_SCRIPT" >"$script"
exec torchrun --nnodes="$nodes" --node_rank="$rank" --master_addr="$PITCREW_RANK0_ADDRESS" \
    --master_port="${PITCREW_RANK0_PORT:-29500}" --nproc_per_node=gpu "$script"
