# One static binary and nothing else. Build it at the top of the tree:
#   docker build --tag registry.example/gpu/pitcrew:0.1.0 .
FROM rust:1.95-alpine AS build
# ring and mimalloc have parts in C.
RUN apk add --no-cache build-base
WORKDIR /src
COPY . .
# Alpine's library is musl, and Rust links it in: the binary is static.
RUN cargo build --release --locked --package pitcrew

FROM scratch
COPY --from=build /src/target/release/pitcrew /pitcrew
# A number: the kubelet cannot tell from a name that it is not root.
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["/pitcrew"]
