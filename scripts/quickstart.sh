#!/usr/bin/env bash
# From a fresh clone to a trained GPT, its report and a sample of what it writes, in a few minutes.
#   scripts/quickstart.sh [FLAGS OF pretrain_gpt.py]
# Makes .venv, a data set from the Python standard library's sources, and a run folder. Run again, it
# reuses what is there. Settings by environment:
#   RUN_DIR  run folder                                          (runs/quickstart)
#   STEPS    iterations                                          (as configs/gpt_tiny.yaml says)
#   RANKS    processes: gloo on CPU, one GPU each with NCCL      (2; 1 where there is one GPU)
#   DATA     folder of the data set                              (data/stdlib)
#   PROMPT   what the sample begins with                         ("def main(")
#   PYTHON, VENV: see setup_env.sh
set -euo pipefail
for flag in "$@"; do
  if [[ $flag == -h || $flag == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
  fi
done
# shellcheck source=setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# Names given from outside are relative to where the caller stands; ours to the repository.
for variable in RUN_DIR DATA; do
  value=${!variable:-}
  if [[ -n $value && $value != /* ]]; then printf -v "$variable" '%s' "$PWD/$value"; fi
done
cd "$repo"
RUN_DIR=${RUN_DIR:-runs/quickstart}
DATA=${DATA:-data/stdlib}
PROMPT=${PROMPT:-def main(}

make_environment quickstart
python=$venv/bin/python

prefix=$DATA/corpus_text_document
if [[ ! -f $DATA/corpus.jsonl || ! -f $DATA/tokenizer.json ]]; then
  say "collecting text and training a tokenizer in $DATA"
  "$python" tools/stdlib_corpus.py --output "$DATA"
fi
if [[ ! -f $prefix.bin || ! -f $prefix.idx || ! -f $prefix.json ]]; then
  say "writing $prefix.bin and .idx"
  "$python" tools/preprocess_data.py --input "$DATA/corpus.jsonl" --output-prefix "$DATA/corpus" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer.json" \
    --append-eod --workers 2
fi

# 16 bit where the hardware multiplies it natively; elsewhere it would only be slower.
has_bf16() {
  if [[ $1 != 0 ]]; then
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader | awk -F. '$1 < 8 {old = 1} END {exit old}'
  else
    grep -qsE 'avx512_bf16|amx_bf16' /proc/cpuinfo
  fi
}
gpus=$(gpus_seen)
flags=(--data-path "$prefix")
if has_bf16 "$gpus"; then flags+=(--bf16); fi
[[ -z ${STEPS:-} ]] || flags+=(--train-iters "$STEPS")
ranks=${RANKS:-$((gpus == 1 ? 1 : 2))}

say "training"
PYTHON=$python CONFIG=configs/gpt_tiny.yaml RUN_DIR=$RUN_DIR RANKS_PER_NODE=$ranks NODES=1 \
  scripts/launch.sh -- "${flags[@]}" "$@"

say "a sample"
"$python" tools/generate.py "$RUN_DIR" --prompt "$PROMPT"

"$python" - "$RUN_DIR/metrics.jsonl" <<'PY'
import json, sys

lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
losses = [(line["iteration"], line["valid_loss"]) for line in lines if "valid_loss" in line]
(first, before), (last, after) = losses[0], losses[-1]
print(f"\nvalidation loss {before:.3f} at step {first}, {after:.3f} at step {last}: "
      f"{after / before:.0%} of the first")
PY
cat <<END
report        $RUN_DIR/report.html
loss curve    $RUN_DIR/loss.png
every step    $RUN_DIR/metrics.jsonl  $RUN_DIR/metrics.csv
log           $RUN_DIR/log.txt
checkpoints   $RUN_DIR/checkpoints
settings      $RUN_DIR/config.yaml
Next, write more with it:
  $(printf '%q ' "$python" tools/generate.py "$RUN_DIR" --prompt "class Reader:")
or train it for longer, from where it stands:
  $(printf 'RUN_DIR=%q STEPS=2000 scripts/quickstart.sh' "$RUN_DIR")
END
