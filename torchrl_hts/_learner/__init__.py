"""The learner lends rounds, stages parameters, and says what a checkpoint holds."""
