# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["bucketrl[proxy,s3,hf]"]
# ///
"""Starts the proxy where there is nothing but Python: a Hugging Face Job, a spot instance, any box.

    uv run --find-links dist jobs/start_proxy.py --bucket s3://my-bucket/run-1 --host 0.0.0.0 --port 8080
    pip install --find-links dist 'bucketrl[proxy,s3,hf]' && python jobs/start_proxy.py …

`dist` holds the wheel (`uv build --wheel`); leave the option out where an index has bucketrl. Two cores and
1 GB are plenty; no GPU.

Environment: BUCKETRL_WORKER_TOKEN, BUCKETRL_READ_TOKEN   the tokens that jobs and people must send
             AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL for s3:// buckets; HF_TOKEN for hf://
"""

import sys

from bucketrl.jobs.cli import main

if __name__ == "__main__":
    sys.exit(main(["proxy", *sys.argv[1:]]))
