# Memory errors so far, summed over all GPUs. Aggregate counters: the volatile ones start at 0 with every driver load.
# A GPU that has no ECC, or has it switched off, answers N/A: it is counted, its errors are not.
set -eu
query=ecc.errors.corrected.aggregate.total,ecc.errors.uncorrected.aggregate.total
rows=$(smi --query-gpu="$query" --format=csv,noheader,nounits)
numbers=$(printf '%s\n' "$rows" | awk -F ', *' '
    NF == 0 { next }
    { gpus++ }
    $1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+$/ { with++; corrected += $1; uncorrected += $2; next }
    $1 ~ /N\/A|Not Supported/ && $2 ~ /N\/A|Not Supported/ { next }
    { print "GPU " gpus - 1 " answers \"" $0 "\", which is neither a count nor N/A" > "/dev/stderr"; bad = 1 }
    END {
        if (!gpus) print "nvidia-smi lists no GPU" > "/dev/stderr"
        if (!gpus || bad) exit 1
        printf "{\"gpus\": %d, \"withEcc\": %d, \"corrected\": %.0f, \"uncorrected\": %.0f}\n", gpus, with, corrected, uncorrected
    }')
echo "$numbers"
echo "$numbers" >"$out"
