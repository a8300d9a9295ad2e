"""Write critiques and spans for responses that the data holds or that a policy is sampled for.

    python -m jobs.annotate --config configs/kodcode/annotate.yaml data.path=my.jsonl annotate.source=program

Each judgement goes into journal.jsonl when it is made, and is not requested again: kill the job at any time, start it
again. At the end annotated.jsonl has one record for each response, in the order of the data, failed ones with their
reason; the usable ones are split by prompt into train.jsonl and heldout.jsonl; annotated.json, written last, counts.
The same command again asks for those that failed. run.smoke=true does the first prompts, in the folder `smoke`, and
says how long all will take. The record's format: t2g/README.md.
"""

import sys

from jobs.annotate.annotation_job import READ_SAMPLES, complete_annotation, describe
from jobs.common.cli import main
from t2g.config import AnnotateJob

if __name__ == "__main__":
    sys.exit(main(AnnotateJob, complete_annotation, describe, read=READ_SAMPLES))
