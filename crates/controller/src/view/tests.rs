use serde_json::{Value, json};

use super::*;

fn says(container: &Value) -> Option<String> {
    let status = serde_json::from_value(json!({"containerStatuses": [container]})).unwrap();
    trouble(&status).map(|trouble| format!("{}: {}", trouble.reason, trouble.message))
}

#[test]
fn a_crash_loop_says_how_the_container_ended_and_nothing_else_does() {
    let waiting = |reason: &str| json!({"waiting": {"reason": reason, "message": "later"}});
    let ended =
        json!({"terminated": {"exitCode": 1, "reason": "Error", "message": "first\n the last line \n\n"}});
    let silent = json!({"terminated": {"exitCode": 1, "reason": "Error"}});
    for (state, last, expected) in [
        (waiting("CrashLoopBackOff"), &ended, Some("CrashLoopBackOff: the last line")),
        (waiting("CrashLoopBackOff"), &silent, Some("CrashLoopBackOff: later")),
        (waiting("ImagePullBackOff"), &ended, Some("ImagePullBackOff: later")),
        (waiting("PodInitializing"), &ended, None),
        (ended.clone(), &silent, Some("Error: the last line")),
        (json!({"running": {}}), &ended, None),
    ] {
        let container = json!({"name": "c", "state": state, "lastState": last});
        assert_eq!(says(&container).as_deref(), expected, "{container}");
    }
}

#[test]
fn last_words_are_a_sentence_and_no_log() {
    let message = "ü".repeat(4096);
    let long =
        json!({"name": "c", "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": message}}});
    assert_eq!(says(&long).unwrap().chars().count(), "Error: ".len() + LAST_WORDS_MAX);
}
