#!/usr/bin/env bash
# From a fresh clone to a trained GPT, its report and a sample of what it writes, in a few minutes.
#   scripts/quickstart.sh [FLAGS OF pretrain_gpt.py]
# Makes .venv, a data set from the Python standard library's sources, and two runs of it: one with
# dense gradients, one with Radius. Times a few steps first and chooses how many both train: as many
# as fit into about three minutes, or 350 each where the machine needs longer for 350.
# Run again, it reuses what is there. Settings by environment:
#   RUN_DIR  folder of the two run folders                       (runs/quickstart)
#   STEPS    iterations of each     (350 to 1200, as many as fit; those of the runs that are there)
#   RANKS    processes: gloo on CPU, one GPU each with NCCL      (2; 1 where there is one GPU)
#   DATA     folder of the data set                              (data/stdlib)
#   CORPUS_BYTES  of text at most that the data set is made of   (16000000)
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
CORPUS_BYTES=${CORPUS_BYTES:-16000000}
[[ $CORPUS_BYTES =~ ^[1-9][0-9]{0,11}$ ]] ||
  refuse "CORPUS_BYTES=$CORPUS_BYTES: must be a whole number, 1 or more"

make_environment quickstart
python=$venv/bin/python

prefix=$DATA/corpus_text_document
if [[ ! -f $DATA/corpus.jsonl || ! -f $DATA/tokenizer.json ]]; then
  say "collecting text and training a tokenizer in $DATA"
  "$python" tools/stdlib_corpus.py --output "$DATA" --max-bytes "$CORPUS_BYTES"
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
gpus=$(count_gpus)
# Few steps learn more with a second moment that forgets sooner than Adam's default.
flags=(--data-path "$prefix" --adam-beta2 0.95)
if has_bf16 "$gpus"; then flags+=(--bf16); fi
ranks=${RANKS:-$((gpus == 1 ? 1 : 2))}
[[ ${STEPS:-1} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "STEPS=$STEPS: must be a whole number, 1 or more"

# What a user has set for launches of their own, such as a site that submits, is not for these.
launch() { # run folder, gradient path, flags
  local folder=$1 path=$2
  shift 2
  SITE=local LAUNCHER='' ENTRY='' PROGRAM='' TIME='' \
    PYTHON=$python CONFIG=configs/gpt_tiny.yaml RUN_DIR=$folder GRAD_PATH=$path \
    RANKS_PER_NODE=$ranks NODES=1 scripts/launch.sh -- "${flags[@]}" "$@"
}
# Sets steps (0 if unknown), evaluated (steps between evaluations), interval (Radius's) and seconds.
choose_steps() {
  local chosen
  chosen=$("$python" tools/quickstart_steps.py "$RUN_DIR" "$@") || exit
  read -r steps evaluated interval seconds <<<"$chosen"
}
choose_steps ${STEPS:+--steps "$STEPS"}
if ((steps == 0)); then
  say "timing a few steps"
  timing=$(mktemp -d)
  trap 'rm -rf "$timing"' EXIT
  launch "$timing/run" dense "$@" --train-iters 10 --eval-iters 0 --eval-at-start false \
    >"$timing/log" 2>&1 || {
    code=$?
    cat "$timing/log" >&2
    exit "$code"
  }
  choose_steps --timed "$timing/run"
  say "both runs train $steps steps, together about $((seconds / 60 + 1)) minutes here; STEPS overrides"
fi

train() {
  local path=$1
  shift
  say "training $steps steps with --grad-path $path"
  launch "$RUN_DIR/$path" "$path" --train-iters "$steps" --eval-interval "$evaluated" "$@"
}
train dense "$@"
train radius --radius-interval "$interval" "$@"

say "a sample"
"$python" tools/generate.py "$RUN_DIR/dense" --prompt "$PROMPT"

say "comparing the two"
"$python" tools/report.py "$RUN_DIR/dense" "$RUN_DIR/radius" --output "$RUN_DIR" >/dev/null
"$python" - "$RUN_DIR" dense radius <<'PY'
import json, sys

folder, *paths = sys.argv[1:]
print()
for path in paths:
    with open(f"{folder}/{path}/metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    losses = [line["valid_loss"] for line in lines if "valid_loss" in line]
    sent = [line["bytes_sent"] for line in lines if "bytes_sent" in line]
    learnt = "no validation loss"  # with --eval-iters 0
    if losses:
        learnt = (f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
                  f"{losses[-1] / losses[0]:.0%} of the first")
    print(f"{path:6}  {learnt}; each rank sent {sum(sent) / 1e9:.2f} GB, "
          f"in most steps {sorted(sent)[len(sent) // 2] / max(1, sent[0]):.0%} of the first's")
PY
cat <<END

both runs     $RUN_DIR/comparison.html
each of them  $RUN_DIR/dense/report.html  $RUN_DIR/radius/report.html
every step    $RUN_DIR/{dense,radius}/metrics.jsonl
logs          $RUN_DIR/{dense,radius}/log.txt
checkpoints   $RUN_DIR/{dense,radius}/checkpoints
settings      $RUN_DIR/{dense,radius}/config.yaml
Next, write more with one of them:
  $(printf '%q ' "$python" tools/generate.py "$RUN_DIR/radius" --prompt "class Reader:")
or train both for longer, from where they stand:
  $(printf 'RUN_DIR=%q DATA=%q STEPS=2000 scripts/quickstart.sh' "$RUN_DIR" "$DATA")${1:+$(printf ' %q' "$@")}
END
