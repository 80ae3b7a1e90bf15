#!/bin/bash
# Makes the committed drafters of ../target anew, in build/tiny_drafters; each part resumes.
#   bash examples/tiny_deepseek_v4/drafters/make.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
example=$(dirname "$here")
cd "$example/../.."
out=build/tiny_drafters
port=${PORT:-30000}

python "$example/exchange_prompts.py" training --out $out/prompts
python -m sglang.launch_server --model-path "$example/target" --dtype float32 --port "$port" \
    --max-total-tokens 32768 --log-level warning &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
    kill -0 $server
    sleep 2
done
answer() { # temperature, names of files
    local temperature=$1
    shift
    for name in "$@"; do
        hyperdflash regenerate --server "http://127.0.0.1:$port" --target "$example/target" \
            --input $out/prompts/"$name".jsonl --output $out/answers/"$name".jsonl \
            --temperature "$temperature" --top-p 1 --top-k -1 --max-new-tokens 160
    done
}
answer 0 greedy held_out_math held_out_code held_out_chat
answer 1 sampled
kill $server

new() { # name, then what hyperdflash init can choose
    local name=$1
    shift
    [ -d $out/"$name"/new ] || hyperdflash init --target "$example/target" --out $out/"$name"/new "$@"
}
new hyperdflash
new dflash --reducer fc --source layers --layer-ids 1 3 5
new dflash_best --reducer fc --source layers --layer-ids 4 5 6
for name in hyperdflash dflash dflash_best; do
    hyperdflash train --config "$here/$name.toml" --work $out/"$name"/work
done
python "$example/train_mtp.py" --answers $out/answers --out $out/mtp/trained
