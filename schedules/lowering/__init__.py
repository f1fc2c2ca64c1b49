"""From a scheduled program to TVM's code generators: the pipeline, and the passes that schedules annotate for."""
