"""Images from Dockerfiles, without a daemon of Docker's: each instruction that changes files is a prepared environment."""

from sandmill.builds.build import BuildError, Built, build
from sandmill.builds.dockerfile import Dockerfile, DockerfileError, Instruction, Stage, read

__all__ = ["BuildError", "Built", "Dockerfile", "DockerfileError", "Instruction", "Stage", "build", "read"]
