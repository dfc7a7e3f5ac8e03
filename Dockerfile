# docker build -t traceloom .
# docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" traceloom report run -o report.html
FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels "/source[remote]"

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels "traceloom[remote]"
ENV TRACELOOM_CACHE_DIR=/tmp/traceloom
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["traceloom"]
CMD ["--help"]
