//! A small Kubernetes inside the process, for the demo and for tests.
//!
//! ```text
//!  api/      the API: object store, watch log, patches, eviction; a tower::Service under a real kube::Client
//!  actors/   who works in a cluster: built-in controllers, scheduler, operator, kubelets; ordinary API clients
//!  fleet.rs  what is in the cluster to begin with: GPU nodes, the operator's policy, workloads
//!  cluster.rs    all of it together, embedded or on a real control plane
//!  scenario.rs   how a story is told; scenarios.rs the stories
//!  simulate/ random fleets under random faults, promises checked at every change
//!  plane/    a real etcd, kube-apiserver, controller-manager and scheduler as child processes on loopback
//! ```
//!
//! Kubelets and operator speak only to a `kube::Client`, so the same actors work in the embedded cluster on
//! virtual time and in a real control plane on real time.

pub mod actors;
pub mod api;
pub mod cluster;
pub mod fleet;
pub mod plane;
pub mod scenario;
pub mod scenarios;
pub mod simulate;
