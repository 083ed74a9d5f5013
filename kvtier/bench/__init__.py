"""What `kvtier bench …` measures with."""
