//! What is asked of a Prometheus in a bake, asked of a real one that scrapes pitcrew's own metrics.

use std::time::Duration;

use pitcrew_controller::metrics::Metrics;
use pitcrew_controller::prometheus::over_http;
use pitcrew_controller::serve::serve;
use pitcrew_core::prometheus::{Question, Values};
use pitcrew_sim::plane::{Binaries, Plane, PlaneOptions, Prometheus, User};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Some seconds to start, one more to scrape; a busy machine gets its time.
const PATIENCE: Duration = Duration::from_mins(1);

async fn ask(prometheus: &Prometheus, query: &str) -> Result<Values, String> {
    let question = Question { url: prometheus.url().to_owned(), query: query.to_owned() };
    over_http(None)(question).await
}

#[tokio::test]
async fn a_real_prometheus_is_asked() {
    let Some(program) = Prometheus::find() else {
        println!(
            "left out: there is no Prometheus; `cargo xtask alerts` unpacks Debian's package, if it can be had"
        );
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let metrics_at = listener.local_addr().unwrap();
    let served = tokio::spawn(serve(listener, Metrics::new(), watch::channel(true).1));
    let data = tempfile::tempdir().unwrap();
    let prometheus = Prometheus::start(&program, data.path(), metrics_at).unwrap();

    // It has scraped us once.
    let begun = Instant::now();
    let leads = loop {
        match ask(&prometheus, "pitcrew_leader").await {
            Ok(values) => break values,
            Err(why) if begun.elapsed() > PATIENCE => panic!("{why}\n{}", prometheus.last_words()),
            Err(_) => sleep(Duration::from_millis(200)).await,
        }
    };
    assert!(leads.lowest.value.abs() < 1e-9, "{leads:?}");
    assert!(leads.lowest.labels.starts_with("pitcrew_leader{instance="), "{leads:?}");

    let values =
        ask(&prometheus, "vector(3) or label_replace(vector(7), \"gpu\", \"1\", \"\", \"\")").await.unwrap();
    let pairs = [
        (values.lowest.labels.as_str(), values.lowest.value),
        (values.highest.labels.as_str(), values.highest.value),
    ];
    assert_eq!(pairs, [("", 3.0), ("{gpu=\"1\"}", 7.0)]);
    assert_eq!(ask(&prometheus, "42").await, Ok(Values::one(42.0)));

    let silent = [
        ("DCGM_FI_DEV_XID_ERRORS", "there is no such series"),
        ("sum(pitcrew_leader) / 0 * 0", "its value is NaN"),
        ("vector(1) / 0", "its value is +Inf"),
        ("pitcrew_leader[1m]", "the query gives a matrix"),
        ("sum(", "it refused the query: invalid parameter \"query\""),
    ];
    for (query, expected) in silent {
        let why = ask(&prometheus, query).await.unwrap_err();
        assert!(why.starts_with(expected), "{query}: {why}");
    }
    served.abort();
    let url = prometheus.url().to_owned();
    drop(prometheus);
    let why = over_http(None)(Question { url, query: "42".to_owned() }).await.unwrap_err();
    assert!(why.contains("refused"), "{why}");
}

/// Whoever speaks TLS and asks for a token will do: an API server does both.
#[tokio::test]
async fn credentials_are_read_for_every_question_and_sent_over_https() {
    let plane = Plane::start_api(&Binaries::find().unwrap(), PlaneOptions::default()).await.unwrap();
    let (credentials, url) = (tempfile::tempdir().unwrap(), plane.server_url().to_string());
    let asks = over_http(Some(credentials.path().to_owned()));
    let ask = || asks(Question { url: url.clone(), query: "42".to_owned() });
    let why = ask().await.unwrap_err();
    assert!(why.contains("certificate"), "nobody vouches for it: {why}");
    std::fs::copy(plane.ca(), credentials.path().join("ca.crt")).unwrap();
    let why = ask().await.unwrap_err();
    assert!(why.contains("403"), "without a token it is a stranger: {why}");
    let token = credentials.path().join("token");
    std::fs::write(&token, "guessed").unwrap();
    let why = ask().await.unwrap_err();
    assert!(why.contains("401"), "a wrong token: {why}");
    std::fs::write(&token, format!("{}\n", plane.token(User::Admin))).unwrap();
    let why = ask().await.unwrap_err();
    assert!(why.contains("404"), "it may ask, and this is no Prometheus: {why}");
}
