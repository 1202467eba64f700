# One process for each GPU of this node.
set -eu
script=$(mktemp)
printf '%s' "$PITCREW_SCRIPT" >"$script"
exec torchrun --standalone --nproc_per_node=gpu "$script"
