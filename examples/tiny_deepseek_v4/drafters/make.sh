#!/bin/bash
# Makes drafters of ../target anew, in build/tiny_drafters; what is finished is not done again.
#   bash examples/tiny_deepseek_v4/drafters/make.sh [NAME ...]
# Without names the committed ones. Two calls with other names, and THREADS=1, share two cores well.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
example=$(dirname "$here")
cd "$example/../.."
out=build/tiny_drafters

shape="--layers 3 --heads 4 --kv-heads 2 --head-dim 64 --intermediate-size 768 --window none"
declare -A init=( # options of hyperdflash init for each drafter
    [hyperdflash]="--dependency-rank 0"
    [hyperdflash2]="--dependency-rank 128"
    [dflash]="--layer-ids 1 3 5 --dependency-rank 0"
    [dflash_late]="--layer-ids 4 5 6 --dependency-rank 0"
    [dspark]="--layer-ids 5 6 7 --dependency-rank 128 --dependency-top-k 1363"
    [dflash2]="--layer-ids 1 3 5 --dependency-rank 128 --dependency-top-k 16 --dependency-form product"
)
names=("$@")
[ $# -gt 0 ] || names=(hyperdflash2 hyperdflash dflash dspark dflash2 mtp)

python "$example/own_answers.py" --out $out/answers
for name in "${names[@]}"; do
    if [ "$name" = mtp ]; then
        python "$example/train_mtp.py" --answers $out/answers --out $out/mtp/trained \
            --threads "${THREADS:-2}"
        continue
    fi
    # shellcheck disable=SC2086
    [ -d $out/"$name"/new ] ||
        hyperdflash init --target "$example/target" --out $out/"$name"/new $shape ${init[$name]}
    hyperdflash train --config "$here/$name.toml" --work $out/"$name"/work \
        --threads "${THREADS:-2}"
    case $name in dflash | dflash_late) # for SGLang's own DFLASH
        python -c 'import pathlib, sys; from sglang_hyperdflash.training.drafter import name_for_dflash
name_for_dflash(pathlib.Path(sys.argv[1]))' $out/"$name"/trained ;;
    esac
done
