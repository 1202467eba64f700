//! The value of the annotation: who asks, in which boot of the node, since when.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::node::Node;

/// A request to load a driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The pod that asks, if it knows its own UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The boot in which it asked.
    pub boot: String,
    /// Since when.
    pub since: Timestamp,
}

impl Request {
    /// The request on a node; `None` if there is none, or one that another program wrote.
    pub fn found(node: &Node, annotation: &str) -> Option<Self> {
        serde_json::from_str(node.annotations.get(annotation)?).ok()
    }

    /// The same pod asked in the same boot. A request of another pod, or from before a reboot, is nobody's any more: two
    /// drivers of one kind are never loaded on one node.
    pub fn is_same(&self, other: &Self) -> bool {
        self.pod == other.pod && self.boot == other.boot
    }

    /// As it is written.
    pub fn text(&self) -> String {
        // A request always is valid JSON; if it were not, the documented value is a request too.
        serde_json::to_string(self).unwrap_or_else(|_| "true".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_other_pods_and_other_boots_are_stale() {
        let ours =
            Request { pod: Some("uid".to_owned()), boot: "b1".to_owned(), since: Timestamp::UNIX_EPOCH };
        let read: Request = serde_json::from_str(&ours.text()).unwrap();
        assert_eq!(read, ours);
        assert!(read.is_same(&Request { since: Timestamp::MAX, ..ours.clone() }));
        assert!(!read.is_same(&Request { boot: "b2".to_owned(), ..ours.clone() }));
        assert!(!read.is_same(&Request { pod: None, ..ours.clone() }));
        let mut node = Node::default();
        assert_eq!(Request::found(&node, "a"), None);
        node.annotations.insert("a".to_owned(), "true".to_owned());
        assert_eq!(Request::found(&node, "a"), None, "the value that others write");
    }
}
