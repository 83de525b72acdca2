cd /work/next; export PATH=/work/main/.venv/bin:$PATH OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline SPARSETRON_SHARED_DATA=/work/shared/data
nice -n 19 python -m pytest -q --maxfail 40 -p no:xdist "$@" 2>&1 | tail -60
