#!/usr/bin/env bash
# Fifteen minutes on a lent GPU, as one script. Run it in the project's root, where `python3` (or $PYTHON) has torch.
#   checks/gpu_day.sh keep                brings data: moves .parts/* to /tmp/parts; repeat it for files in several parts
#                                         (split -b 60m data/cifar10.npz .parts/cifar10.npz.)
#   checks/gpu_day.sh check               1. gpu_check.py with its variants, at most six minutes
#   checks/gpu_day.sh train MINUTES       2. FedAvg on CIFAR-10, 2,000 rounds, 3. Psi-Net with BatchNorm, for
#                                         the rest of the time; a later call goes on with it
#   checks/gpu_day.sh all MINUTES         check, then train; --device cpu --quick after it tries the script without a GPU
# What is to come back lies in $OUT: gpu_check's table and JSON, and runs.tgz with the records and Psi-Net's state.
set -u -o pipefail
OUT=${OUT:-/tmp/out} PYTHON=${PYTHON:-python3} what=${1:-} minutes=9
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
[ $# -gt 0 ] && shift
case "${1:-}" in [0-9]*) minutes=$1; shift ;; esac
quick= device=cuda
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=1 ;;
    --device) device=$2; shift ;;
    *) echo "gpu_day.sh: unknown: $1" >&2; exit 2 ;;
  esac
  shift
done
begin=$(date +%s)
left() { echo $((minutes * 60 - ($(date +%s) - begin) - 20)); } # 20 s to pack

limited() { # SECONDS NAME COMMAND...: the command's last lines go to $OUT/NAME.txt; it ends after so long
  local seconds=$1 name=$2; shift 2
  [ "$seconds" -gt 0 ] || { echo "$name: no time is left" | tee "$OUT/$name.txt"; return 0; }
  timeout --signal INT --kill-after 20 "$seconds" "$@" 2>&1 | tee "$OUT/$name.txt" | tail -n 60
  echo "$name: exit code ${PIPESTATUS[0]} after $(($(date +%s) - begin)) s"
}

at_most() { [ "$1" -lt "$2" ] && echo "$1" || echo "$2"; }

check() {
  limited "$(at_most 360 "$(left)")" gpu-check "$PYTHON" checks/gpu_check.py --device "$device" --out "$OUT" \
    ${quick:+--quick --only "10 x superfed-cnn" evaluation fedavg}
}

train() {
  mkdir -p data
  for part in /tmp/parts/*.aa; do # the first of a file's parts
    [ -e "$part" ] && cat "${part%.aa}".?? > "data/$(basename "${part%.aa}")"
  done
  local data=cifar10 rounds=2000 small=()
  if [ -n "$quick" ]; then data=shapes rounds=2 small=(--limit 100 --clients 4 --epochs 1 --batch-size 10); fi
  limited "$(at_most 240 "$(left)")" fedavg "$PYTHON" fedavg.py --dataset $data --device "$device" \
    --rounds $rounds --lr 0.316 --target 0.8 0.82 0.85 --out runs/gpu-day/fedavg "${small[@]}"
  limited "$(left)" psinet "$PYTHON" psinet.py --dataset $data --device "$device" --groups 0 --norm bn \
    ${quick:+--rounds 2} $([ "$device" = cpu ] || echo --precision bf16) --resume --out runs/gpu-day/psinet "${small[@]}"
  tar czf "$OUT/runs.tgz" runs/gpu-day/*/result.json $(ls runs/gpu-day/psinet/state.pt 2>/dev/null)
}

case "$what" in
  keep) mkdir -p /tmp/parts && cp .parts/* /tmp/parts/ && ls -l /tmp/parts ;;
  check) check ;;
  train) train ;;
  all) check; train ;;
  *) sed -n 2,10p "$0"; exit 2 ;;
esac
ls -l "$OUT"
