# The RayJob runs this on the head of its cluster. A job that is tried again goes on with the run.
set -euo pipefail
cd /work
resume=()
if [ -e "runs/$HEADWAY_RUN/incarnation" ]; then # a learner of this run has begun
    resume=(--resume)
fi
exec headway ray up /etc/headway/recipe/recipe.yaml --address auto "${resume[@]}"
