//! Creating objects from descriptions, many at a time; what is there already stays as it is.

use std::fmt::Debug;

use futures::stream::{self, StreamExt, TryStreamExt};
use kube::api::PostParams;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Error;

/// Enough to install a thousand nodes in a moment, few enough for a small API server.
const CREATES_IN_FLIGHT_MAX: usize = 32;

pub(super) fn described<K: DeserializeOwned>(
    kind: &'static str,
    objects: impl Iterator<Item = Value>,
) -> Result<Vec<K>, Error> {
    let object = |value| serde_json::from_value(value).map_err(|source| Error::Describe { kind, source });
    objects.map(object).collect()
}

pub(super) async fn create_all<K>(api: &Api<K>, objects: Vec<K>) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + k8s_openapi::Resource,
{
    in_parallel(objects.into_iter().map(|object| create(<K as k8s_openapi::Resource>::KIND, api, object)))
        .await
}

pub(super) async fn in_parallel(
    creates: impl Iterator<Item = impl Future<Output = Result<(), Error>>>,
) -> Result<(), Error> {
    stream::iter(creates).buffered(CREATES_IN_FLIGHT_MAX).try_collect().await
}

pub(super) async fn create<K>(kind: &'static str, api: &Api<K>, object: K) -> Result<(), Error>
where
    K: Resource + Clone + Debug + Serialize + DeserializeOwned,
{
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(source) => Err(Error::Create { kind, name: object.name_any(), source }),
    }
}
