//! The value of the annotation: who asks, in which boot of the node, since when.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::host::{Host, HostResult};
use crate::node::Node;

/// What the kubelet mounts into every container from its directory of the pod, whose name is the pod's UID.
const OF_THE_POD: [&str; 2] = ["/dev/termination-log", "/etc/hosts"];

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
    /// drivers of one kind are never loaded on one node. Of two pods without a name each has its own request, told by the
    /// moment: what one has asked, the other must not take back.
    pub fn is_same(&self, other: &Self) -> bool {
        let known = self.pod.is_some() || self.since == other.since;
        self.pod == other.pod && self.boot == other.boot && known
    }

    /// As it is written.
    pub fn text(&self) -> String {
        // A request always is valid JSON; if it were not, the documented value is a request too.
        serde_json::to_string(self).unwrap_or_else(|_| "true".to_owned())
    }
}

/// The UID of the pod that this program runs in, for manifests that do not say it. The name of the host would not do:
/// pods in the host's network, as those of network drivers are, have the node's.
pub(super) async fn own_pod(host: &impl Host) -> HostResult<Option<String>> {
    let mounts = host.read("/proc/self/mountinfo").await?.unwrap_or_default();
    Ok(mounts.lines().find_map(pod_of))
}

/// From a line such as `95 90 8:1 /var/lib/kubelet/pods/<uid>/etc-hosts /etc/hosts rw - …`.
fn pod_of(line: &str) -> Option<String> {
    let mut fields = line.split(' ').skip(3);
    let (source, mount_point) = (fields.next()?, fields.next()?);
    let uid = source.rsplit_once("/pods/")?.1.split('/').next()?;
    OF_THE_POD.contains(&mount_point).then(|| uid.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_uid_is_in_the_mounts_that_the_kubelet_makes() {
        let uid = "1f9b5f0e-4d0e-4c56-9f8e-2a1b7c3d4e5f";
        for line in [
            format!("95 90 8:1 /var/lib/kubelet/pods/{uid}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw"),
            format!("96 90 8:2 /pods/{uid}/containers/c/1a2b /dev/termination-log rw - xfs /dev/sdb rw"),
        ] {
            assert_eq!(pod_of(&line).as_deref(), Some(uid), "{line}");
        }
        for line in [
            "95 90 8:1 /etc/hosts /etc/hosts rw - ext4 /dev/sda1 rw",
            // Another pod's directory, which a container may have mounted.
            "95 90 8:1 /var/lib/kubelet/pods/other/volumes/v /data rw - ext4 /dev/sda1 rw",
            "",
        ] {
            assert_eq!(pod_of(line), None, "{line}");
        }
    }

    #[test]
    fn pods_without_a_name_are_told_apart_by_the_moment_at_which_they_asked() {
        let ours = Request { pod: None, boot: "b1".to_owned(), since: Timestamp::UNIX_EPOCH };
        assert!(ours.is_same(&ours.clone()));
        assert!(!ours.is_same(&Request { since: Timestamp::MAX, ..ours.clone() }));
    }

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
