# The node's own nvidia-smi: the driver container's, the host's, or this image's. It needs no GPU to be free.
host=${PITCREW_HOST:-/host}
out=${PITCREW_OUTPUT:-/dev/termination-log}
smi() {
    for root in "$host/run/nvidia/driver" "$host"; do
        if [ -d "$root" ] && chroot "$root" sh -c 'command -v nvidia-smi' >/dev/null 2>&1; then
            chroot "$root" nvidia-smi "$@"
            return
        fi
    done
    nvidia-smi "$@"
}
