"""recover-tools: what comes with the package beside its modules, found wherever it is installed.

recover-tools                        what there is, and where
recover-tools corpus [OPTIONS]       a small corpus to train on            (scripts/prepare_corpus.py)
recover-tools patch CHECKOUT         have a Megatron-LM checkout take --recover  (scripts/apply_patches.sh)
recover-tools gpu-checks [OPTIONS]   check a GPU; needs the source tree    (scripts/gpu_checks.sh)
recover-tools copy slurm FOLDER      copy files to edit: slurm, examples, patches, docs
"""
