//! Questions over HTTP, to a small server on loopback that answers as it is told.

#![expect(clippy::unwrap_used, reason = "tests end where something is not as it should be")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::routing::get;
use pitcrew_controller::prometheus::over_http;
use pitcrew_core::prometheus::{Question, Values};
use tokio::net::TcpListener;

/// What the server was asked: the path with its parameters, and whether somebody sent a token.
type Seen = Arc<Mutex<Vec<(String, bool)>>>;

async fn server(status: StatusCode, body: String) -> (SocketAddr, Seen) {
    let seen = Seen::default();
    let noted = seen.clone();
    let answer = move |uri: Uri, headers: HeaderMap| {
        noted.lock().unwrap().push((uri.to_string(), headers.contains_key("authorization")));
        let body = body.clone();
        async move { (status, body) }
    };
    let app =
        Router::new().route("/api/v1/query", get(answer.clone())).route("/prefix/api/v1/query", get(answer));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    (address, seen)
}

async fn ask(url: String, credentials: Option<PathBuf>) -> Result<Values, String> {
    over_http(credentials)(Question { url, query: r#"sum(xid{gpu="1"}) + 1"#.to_owned() }).await
}

const SEVEN: &str = r#"{"status": "success", "data": {"resultType": "scalar", "result": [1767225600, "7"]}}"#;

#[tokio::test]
async fn a_question_is_asked_as_prometheus_understands_it() {
    let (address, seen) = server(StatusCode::OK, SEVEN.to_owned()).await;
    assert_eq!(ask(format!("http://{address}"), None).await, Ok(Values::one(7.0)));
    assert_eq!(ask(format!("http://{address}/prefix"), None).await, Ok(Values::one(7.0)));
    let asked = "/api/v1/query?query=sum%28xid%7Bgpu%3D%221%22%7D%29+%2B+1&timeout=10s";
    assert_eq!(*seen.lock().unwrap(), [(asked.to_owned(), false), (format!("/prefix{asked}"), false)]);
}

#[tokio::test]
async fn a_token_is_not_sent_in_clear_text() {
    let credentials = tempfile::tempdir().unwrap();
    std::fs::write(credentials.path().join("token"), "secret\n").unwrap();
    let (address, seen) = server(StatusCode::OK, SEVEN.to_owned()).await;
    let answer = ask(format!("http://{address}"), Some(credentials.path().to_owned())).await;
    assert_eq!(answer, Ok(Values::one(7.0)));
    assert!(seen.lock().unwrap().iter().all(|(_, token)| !token));
}

#[tokio::test]
async fn whatever_is_no_answer_is_told_in_a_sentence() {
    let bad = r#"{"status": "error", "errorType": "bad_data", "error": "unexpected end of input"}"#;
    let table = [
        (StatusCode::BAD_REQUEST, bad.to_owned(), "it refused the query: unexpected end of input"),
        (StatusCode::BAD_GATEWAY, "<html>".to_owned(), "it answered with HTTP status 502 and no sentence"),
        (StatusCode::FORBIDDEN, String::new(), "it answered with HTTP status 403 and no sentence"),
        (StatusCode::OK, "<html>".to_owned(), "it sent something else than an answer"),
        (StatusCode::OK, " ".repeat(17 << 20), "its answer cannot be read: length limit exceeded"),
    ];
    for (status, body, expected) in table {
        let (address, _) = server(status, body).await;
        assert_eq!(ask(format!("http://{address}"), None).await.unwrap_err(), expected);
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let why = ask(format!("http://{free}"), None).await.unwrap_err();
    assert!(why.contains("Connection refused"), "{why}");
}
