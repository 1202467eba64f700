use super::*;

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn apply(node: &mut Node, decide: impl Fn(&Node) -> Change) {
    let change = decide(node);
    let Change { labels, annotations, unschedulable } = change;
    for (map, changes) in [(&mut node.labels, labels), (&mut node.annotations, annotations)] {
        for (key, value) in changes {
            match value {
                Some(value) => drop(map.insert(key, value)),
                None => drop(map.remove(&key)),
            }
        }
    }
    node.unschedulable = unschedulable.unwrap_or(node.unschedulable);
}

#[test]
fn a_cordon_says_whose_it_is_in_the_same_patch() {
    let node = Node { version: "7".to_owned(), ..Node::default() };
    let body = cordon(&node, NOW).on(&node).unwrap().body(&node.version);
    assert_eq!(
        body,
        json!({
            "metadata": {
                "resourceVersion": "7",
                "annotations": {"pitcrew.dev/driver-manager-cordon": "{\"since\":\"1970-01-01T00:00:00Z\"}"},
            },
            "spec": {"unschedulable": true},
        })
    );
}

#[test]
fn a_foreign_cordon_is_neither_claimed_nor_lifted() {
    let node = Node { unschedulable: true, ..Node::default() };
    assert_eq!(cordon(&node, NOW).on(&node), None);
    assert_eq!(uncordon(&node).on(&node), None);
}

#[test]
fn the_own_cordon_is_lifted_with_its_record() {
    let mut node = Node::default();
    apply(&mut node, |node| cordon(node, NOW));
    assert!(node.unschedulable && node.is_cordoned_by_agent());
    apply(&mut node, uncordon);
    assert_eq!(node, Node::default());
}

#[test]
fn the_record_of_a_cordon_that_somebody_lifted_is_dropped() {
    let mut node = Node::default();
    apply(&mut node, |node| cordon(node, NOW));
    assert_eq!(without_stale_record(&node).on(&node), None);
    node.unschedulable = false;
    apply(&mut node, without_stale_record);
    assert_eq!(node, Node::default());
}

#[test]
fn a_node_that_others_keep_out_is_not_given_back() {
    let mut cordoned = Node::default();
    apply(&mut cordoned, |node| cordon(node, NOW));
    for (key, value) in [
        ("quarantineHealthEventIsCordoned", "True"),
        ("quarantineHealthEventCordonPreExisting", "True"),
        ("pitcrew.dev/visit", "{}"),
    ] {
        let mut node = cordoned.clone();
        node.annotations.insert(key.to_owned(), value.to_owned());
        assert_eq!(uncordon(&node).on(&node), None, "{key}");
    }
    cordoned.labels.insert("pitcrew.dev/keep-cordoned".to_owned(), "true".to_owned());
    assert_eq!(uncordon(&cordoned).on(&cordoned), None);
}

#[test]
fn a_node_that_an_upgrade_controller_works_on_is_not_given_back() {
    for (state, kept) in [
        ("upgrade-required", false),
        ("cordon-required", true),
        ("drain-required", true),
        ("node-maintenance-required", true),
        ("uncordon-required", true),
        ("upgrade-failed", true),
        ("upgrade-done", false),
        ("", false),
    ] {
        let mut node = Node::default();
        apply(&mut node, |node| cordon(node, NOW));
        node.labels.insert("nvidia.com/gpu-driver-upgrade-state".to_owned(), state.to_owned());
        assert!(uncordon(&node).on(&node).is_some(), "{state}: nobody looks after it any more");
        node.annotations.insert("nvidia.com/gpu-driver-upgrade-enabled".to_owned(), "true".to_owned());
        assert_eq!(uncordon(&node).on(&node).is_none(), kept, "{state}");
    }
}

#[test]
fn there_is_a_way_back_from_pre_installed() {
    for before in [Some("true"), Some("custom"), None] {
        let mut node = Node::default();
        node.labels.extend(before.map(|value| (crate::labels::DRIVER.to_owned(), value.to_owned())));
        let untouched = node.clone();
        apply(&mut node, has_host_driver);
        assert_eq!(node.labels[crate::labels::DRIVER], "pre-installed");
        assert_eq!(has_host_driver(&node).on(&node), None, "said once");
        apply(&mut node, has_no_host_driver);
        assert_eq!(node, untouched);
    }
}

#[test]
fn a_pre_installed_that_somebody_else_wrote_stays_theirs() {
    let mut node = Node::default();
    node.labels.insert(crate::labels::DRIVER.to_owned(), "pre-installed".to_owned());
    assert_eq!(has_host_driver(&node).on(&node), None, "it says so already");
    assert_eq!(has_no_host_driver(&node).on(&node), None);
    // What was written down about a label that has changed since says nothing any more.
    node.labels.clear();
    node.annotations.insert(HOST_DRIVER_ANNOTATION.to_owned(), "{\"before\":\"true\"}".to_owned());
    apply(&mut node, has_no_host_driver);
    assert_eq!(node, Node::default());
}

#[test]
fn a_persons_words_about_a_reboot_are_neither_taken_back_nor_written_over() {
    let mut node = Node::default();
    node.annotations.insert(NEEDS_REBOOT_ANNOTATION.to_owned(), "firmware was flashed".to_owned());
    let words = node.clone();
    assert_eq!(reboot_is_over(&node, Change::default()).on(&node), None);
    apply(&mut node, |node| needs_reboot(node, "boot", Some("half of the driver is gone"), NOW));
    assert_eq!(node.annotations[NEEDS_REBOOT_ANNOTATION], "firmware was flashed");
    assert!(node.is_cordoned_by_agent());
    assert_eq!(uncordon(&node).on(&node), None, "the words hold the node");
    node.annotations.remove(NEEDS_REBOOT_ANNOTATION);
    apply(&mut node, |node| needs_reboot(node, "boot", Some("half of the driver is gone"), NOW));
    assert!(node.needs_reboot("boot").is_some(), "the next start says it");
    apply(&mut node, |node| reboot_is_over(node, uncordon(node)));
    node.annotations.insert(NEEDS_REBOOT_ANNOTATION.to_owned(), "firmware was flashed".to_owned());
    assert_eq!(node, words);
}

#[test]
fn a_reboot_that_was_needed_in_another_boot_is_over() {
    let mut node = Node::default();
    apply(&mut node, |node| needs_reboot(node, "first", Some("half of the driver is gone"), NOW));
    assert!(node.unschedulable && node.is_cordoned_by_agent());
    assert_eq!(node.needs_reboot("first").unwrap().why, "half of the driver is gone");
    assert_eq!(node.needs_reboot("second"), None);
}

#[test]
fn why_a_reboot_is_needed_is_said_by_whoever_saw_it() {
    let mut node = Node::default();
    apply(&mut node, |node| needs_reboot(node, "boot", None, NOW));
    assert!(node.needs_reboot("boot").unwrap().why.starts_with("only part of the driver could be unloaded"));
    apply(&mut node, |node| needs_reboot(node, "boot", Some("nvidia is held"), NOW));
    apply(&mut node, |node| needs_reboot(node, "boot", None, NOW));
    assert_eq!(node.needs_reboot("boot").unwrap().why, "nvidia is held");
    apply(&mut node, |node| needs_reboot(node, "next", None, NOW));
    assert_ne!(node.needs_reboot("next").unwrap().why, "nvidia is held", "that was in another boot");
}
