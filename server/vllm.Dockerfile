# vLLM with Mural's plug-in, for `engine: vllm`. Built from the root of the repository:
#   docker build -f server/vllm.Dockerfile -t mural-vllm:0.1.0 .
# The version is the one that `make test-vllm` runs.

FROM vllm/vllm-openai:v0.32.0
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 MURAL_NATIVE=0
WORKDIR /src
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY resolvers/mural_resolvers resolvers/mural_resolvers
COPY server/mural_server server/mural_server
COPY server/native server/native
COPY router/mural_router router/mural_router
COPY router/native router/native
COPY operator/mural_operator operator/mural_operator
RUN python3 -m pip install '.[vllm]'
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin mural
WORKDIR /tmp
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["vllm"]
CMD ["serve"]
