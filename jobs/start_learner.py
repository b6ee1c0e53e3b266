# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["bucketrl[learner,s3,hf]"]
# ///
"""Starts the learner where there is nothing but Python: a Hugging Face Job, a spot instance, any box.

    uv run --find-links dist jobs/start_learner.py --bucket s3://my-bucket/run-1 --proxy http://PROXY:8080
    pip install --find-links dist 'bucketrl[learner,s3,hf]' && python jobs/start_learner.py …

`dist` holds the wheel (`uv build --wheel`); leave the option out where an index has bucketrl. One GPU.
Started again after a loss, it goes on from the last commit; a second one fences the first.

Environment: BUCKETRL_WORKER_TOKEN   what the proxy expects
             AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL for s3:// buckets; HF_TOKEN for hf://
"""

import sys

from bucketrl.jobs.cli import main

if __name__ == "__main__":
    sys.exit(main(["learner", *sys.argv[1:]]))
