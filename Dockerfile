# Images with caffepy, Open MPI and an SSH server for MPI jobs, one target for each kind of machine:
#
#   docker build --target cpu    --tag caffepy:cpu .
#   docker build --target cuda12 --tag caffepy:cuda12 .
#   docker build --target cuda13 --tag caffepy:cuda13 .
#
#   docker run --rm --gpus all --shm-size 8g --volume "$PWD:/work" caffepy:cuda13 \
#       caffepy train --solver solver.prototxt --gpus all
#
# CUDA, cuDNN and NCCL come from PyPI. The host needs the NVIDIA driver and the NVIDIA Container Toolkit only.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
# libgomp: numba's threads. SSH: mpirun starts processes in other containers; Kubernetes' MPI operator mounts the keys,
# and an image's containers are the only hosts that these ports and settings concern.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 1000 mpiuser \
    && mkdir -p /run/sshd /work \
    && chown mpiuser:mpiuser /work \
    && printf '%s\n' 'Host *' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
        '    LogLevel ERROR' > /etc/ssh/ssh_config.d/mpi.conf \
    && printf '%s\n' 'Port 2222' 'PidFile /home/mpiuser/sshd.pid' 'HostKey /home/mpiuser/.ssh/id_rsa' \
        'StrictModes no' 'PasswordAuthentication no' > /etc/ssh/mpi_sshd_config
WORKDIR /work
CMD ["caffepy", "device_query"]

FROM base AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/caffepy-*.whl)[mpi]"
USER mpiuser

FROM base AS cuda12
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/caffepy-*.whl)[mpi,cuda12]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER mpiuser

FROM base AS cuda13
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/caffepy-*.whl)[mpi,cuda13]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER mpiuser
