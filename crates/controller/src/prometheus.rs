//! Asks a Prometheus over HTTP or HTTPS, with the client that kube brings along. Whatever comes of it is an answer.
//!
//! Credentials are files in a directory, so that a Secret or a service account can be mounted as it is: `token` is sent along
//! over HTTPS, and `ca.crt` names who may sign the server's certificate. Both are read for every question, because they
//! change while the controller runs; questions are few.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::BoxFuture;
use http::{Request, Uri, header};
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use kube::{Client, Config};
use pitcrew_core::prometheus::{Question, Values, read};

use crate::setback::sentence;

/// Asks, and never waits for ever: whoever calls it gives up after [`ANSWER_SECONDS`].
pub type Asks = Arc<dyn Fn(Question) -> BoxFuture<'static, Result<Values, String>> + Send + Sync>;

/// A query that takes longer is too dear to be asked every ten minutes.
pub(crate) const ANSWER_SECONDS: u64 = 10;
/// Tens of thousands of series; who has more should aggregate them in the query.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Over HTTP or HTTPS, with the credentials of a directory.
pub fn over_http(credentials: Option<PathBuf>) -> Asks {
    let credentials = Arc::new(credentials);
    Arc::new(move |question| {
        let credentials = credentials.clone();
        Box::pin(async move { ask(&question, credentials.as_deref()).await })
    })
}

async fn ask(question: &Question, credentials: Option<&Path>) -> Result<Values, String> {
    let Question { url, query } = question;
    let address: Uri = url.parse().map_err(|error| format!("\"{url}\" is not an address: {error}"))?;
    let secure = address.scheme_str() == Some("https");
    let mut config = Config::new(address);
    config.default_retry = false; // the next look asks again
    config.root_cert_file = file(credentials, "ca.crt").filter(|_| secure);
    let client = Client::try_from(config).map_err(|error| sentence(&error))?;
    let mut request = Request::get(path(query));
    // A token in clear text would be everybody's.
    if let Some(token) = file(credentials, "token").filter(|_| secure) {
        let token = std::fs::read_to_string(&token)
            .map_err(|error| format!("{} cannot be read: {error}", token.display()))?;
        request = request.header(header::AUTHORIZATION, format!("Bearer {}", token.trim()));
    }
    let request = request.body(Body::empty()).map_err(|error| error.to_string())?;
    let reply = client.send(request).await.map_err(|error| sentence(&error))?;
    let status = reply.status().as_u16();
    let body = Limited::new(reply.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| format!("its answer cannot be read: {error}"))?;
    read(status, &body.to_bytes())
}

/// Nobody listens any more after that time, so nobody has to go on.
fn path(query: &str) -> String {
    let mut parameters = form_urlencoded::Serializer::new(String::new());
    parameters.append_pair("query", query).append_pair("timeout", &format!("{ANSWER_SECONDS}s"));
    format!("/api/v1/query?{}", parameters.finish())
}

/// A file of a directory, if it is there.
fn file(directory: Option<&Path>, name: &str) -> Option<PathBuf> {
    directory.map(|directory| directory.join(name)).filter(|path| path.exists())
}
