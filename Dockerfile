# Outrigger as an image, in two stages: the first compiles the engine, the second only runs. See docker-compose.yml.
#
# The engine is compiled for the processor that builds, as `make setup` does everywhere: build where it is to run.
# Never built where this was written (no container runtime there): the compose file was checked, the image was not.

FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ make git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY . .
# The environment, the compiled engine and the small model, into /app/.venv and /app/.outrigger.
RUN python -m services.setup --quiet && rm -rf .outrigger/wheels

FROM python:3.12-slim-bookworm AS serve
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin outrigger \
    && install -d -o outrigger -g outrigger -m 0700 /run/outrigger /data /journal
COPY --from=build /app /app
RUN install -d -o outrigger -g outrigger /app/.outrigger/checks
WORKDIR /app
USER outrigger
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    OUTRIGGER_RUN_DIR=/run/outrigger OUTRIGGER_DATA_DIR=/data XDG_CACHE_HOME=/data/cache \
    OUTRIGGER_LOG_FORMAT=json
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/.venv/bin/python", "-m"]
CMD ["services.gateway"]
