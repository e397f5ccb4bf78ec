-- An environment module (Lmod): copy to MODULEPATH/kvr-mpi/0.1.0.lua, and set the two paths.
-- Users then write `module load kvr-mpi` and `sbatch $KVR_SLURM_DIR/kvr_prefill.sh JOB.toml`.
local venv = "/apps/kvr-mpi/0.1.0"          -- python -m venv, then pip install with the site's MPI (docs/clusters.md)
local models = "/apps/models/huggingface"   -- filled once, read by all

help([[Long-document LLM batch work over MPI. `kvr --help`, and slurm/README.md beside the job scripts.]])
whatis("Name: kvr-mpi")
whatis("Version: 0.1.0")
whatis("Description: prefill one long prompt over a chain of MPI ranks (KV-Runahead), for whole corpora")

depends_on("python/3.11", "openmpi")        -- the MPI that mpi4py was built with
prepend_path("PATH", pathJoin(venv, "bin"))
setenv("KVR_VENV", venv)
setenv("KVR_SLURM_DIR", pathJoin(venv, "share/kvr-mpi/slurm"))
setenv("HF_HOME", models)
