"""Files and batches of OpenAI's API, over the batch jobs at RQ."""
