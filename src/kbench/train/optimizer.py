"""What AdamW is run with: the same in the step, in its reference, and beside PyTorch."""

# beta2 is lower than the usual 0.999, because the second moment of a language model's gradients changes quickly at the
# start (Brown et al., "Language Models are Few-Shot Learners", 2020, appendix B).
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
