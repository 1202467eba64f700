//! The document's matrix and what people make of it: read, refused, compared, promoted.

use insta::assert_snapshot;
use proptest::prelude::*;

use super::*;

/// As in the document, with the indentation that it had before it was copied.
const DOCUMENT: &str = r#"# gpu-version-matrix.yaml (stored in Git)
versions:
  current:
    gpu_operator: "v24.9.0"
    network_operator: "v24.7.0"
    driver: "560.35.03"
    cuda: "12.6"
    firmware: "28.40.1000"
    sriov: "4.18.0"
    openshift: "4.16.23"
    status: "production"
  canary:
    gpu_operator: "v24.12.0"
    network_operator: "v24.10.0"
    driver: "565.57.01"
    cuda: "12.8"
    firmware: "28.42.1000"
    sriov: "4.18.0"
    openshift: "4.16.23"
    status: "testing"
"#;

fn matrix(text: &str) -> Matrix {
    Matrix::parse(text).unwrap_or_else(|problems| panic!("{problems}\n{text}"))
}

fn problems(text: &str) -> String {
    match Matrix::parse(text) {
        Ok(matrix) => format!("fine: {}", matrix.entries.len()),
        Err(problems) => problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
    }
}

fn version(text: &str) -> DriverVersion {
    text.parse().unwrap()
}

fn lost(text: &str) -> String {
    text.lines().map(str::trim_start).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_document_is_read_as_it_is_meant() {
    let matrix = matrix(DOCUMENT);
    let lines = matrix.entries.iter().flat_map(|(name, entry)| {
        entry.stated().into_iter().map(move |(key, text)| format!("{name}.{key} {text}"))
    });
    assert_snapshot!(lines.collect::<Vec<_>>().join("\n"), @r"
    canary.gpu_operator v24.12.0
    canary.network_operator v24.10.0
    canary.driver 565.57.01
    canary.cuda 12.8
    canary.firmware 28.42.1000
    canary.sriov 4.18.0
    canary.openshift 4.16.23
    canary.status testing
    current.gpu_operator v24.9.0
    current.network_operator v24.7.0
    current.driver 560.35.03
    current.cuda 12.6
    current.firmware 28.40.1000
    current.sriov 4.18.0
    current.openshift 4.16.23
    current.status production
    ");
    assert!(matrix.entries.values().all(|entry| entry.unstated().next().is_none() && entry.extra.is_empty()));
}

#[test]
fn more_entries_and_fields_are_kept() {
    let text = "owner: team-x\nversions:\n  current: {driver: 560.35.03}\n  lab-a100:\n    driver: 550.90.07\n    \
                approved: true\n    notes: [slow, {on: 'a 100'}]\n    why: |\n      two\n      lines\n";
    let matrix = matrix(text);
    let lab = &matrix.entries["lab-a100"];
    assert_eq!(
        lab.extra.iter().map(|(key, text)| format!("{key}={text}")).collect::<Vec<_>>(),
        ["approved=true", "notes=[slow, {on: a 100}]", "why=two lines"]
    );
    assert_eq!(
        lab.unstated().map(Field::key).collect::<Vec<_>>(),
        ["gpu_operator", "network_operator", "cuda", "firmware", "sriov", "openshift", "status"]
    );
}

#[test]
fn lost_indentation_is_said_so_whatever_else_is_wrong() {
    // The document as it is copied today; its last line ran into the heading that follows, so it is no YAML either.
    let copied = lost(DOCUMENT).replace("\"testing\"", "\"testing\"Canary Node Setup");
    let sentence = "its indentation was lost in copying: \"current:\" (line 3) stands no deeper than the \"versions:\" \
                    it belongs to; indent each entry under \"versions:\" by two spaces and its fields by four";
    assert_eq!(problems(&copied), sentence);
    assert_eq!(problems(&lost(DOCUMENT)), sentence);
    assert_eq!(problems(&lost(DOCUMENT).replace('\n', "\r\n")), sentence);
    let one_level = DOCUMENT.replace("    ", "  ");
    assert_eq!(
        problems(&one_level),
        "its indentation was lost in copying: \"gpu_operator:\" (line 4) stands no deeper than the \"current:\" it \
         belongs to; indent each entry under \"versions:\" by two spaces and its fields by four"
    );
    let only_one = "versions:\ncurrent:\ndriver: 560.35.03\n";
    assert!(problems(only_one).starts_with("its indentation was lost"), "{}", problems(only_one));
}

#[test]
fn what_is_wrong_is_one_sentence_with_its_place() {
    let with = |fields: &str| format!("versions:\n  current:\n    {}\n", fields.replace('\n', "\n    "));
    let cases = [
        String::new(),
        "# nothing but words\n".to_owned(),
        "just words".to_owned(),
        "driver: 560.35.03\n".to_owned(),
        "versions:\n".to_owned(),
        "versions: [a, b]\n".to_owned(),
        "versions: {}\n".to_owned(),
        "versions:\n  canary:\n    driver: 565.57.01\n".to_owned(),
        "versions:\n  current: 560.35.03\n".to_owned(),
        "versions:\n  current:\n".to_owned(),
        "versions:\n\tcurrent:\n\t\tdriver: 560.35.03\n".to_owned(),
        "versions:\n  current: {driver: 560.35.03\n".to_owned(),
        "versions: {current: {}}\n---\nversions: {current: {}}\n".to_owned(),
        "versions:\n  current: &now {driver: 560.35.03}\n  canary: *now\n".to_owned(),
        "versions:\n  current: {driver: !!str 560.35}\n".to_owned(),
        "versions:\n  current: {[a]: b}\n".to_owned(),
        "versions:\n  current: {}\n  current: {}\n".to_owned(),
        with("driver: 560.35.03\ncuda: 12.6\ndriver: 560.35.03"),
        with("driver:\nstatus: production"),
        with("driver: \"\""),
        with("driver: latest"),
        with("driver: 560.35.03\ncuda: [12.6]"),
        with("firmware: |\n  28.40.1000"),
        with("gpu_operator: \"v24\\n9\""),
        with("driver: 565.57.x\ncuda: 12.10\nstatus: yes"),
    ];
    let told: Vec<String> = cases.iter().map(|text| format!("{text:?}\n{}\n", problems(text))).collect();
    assert_snapshot!(told.join("\n"));
}

#[test]
fn a_number_without_quotes_is_read_only_if_everybody_reads_the_same() {
    let cuda = |written: &str| {
        let text = format!("versions:\n  current:\n    cuda: {written}\n");
        Matrix::parse(&text)
            .map(|matrix| matrix.current().unwrap().cuda.clone().unwrap().to_string())
            .map_err(|problems| problems.to_string())
    };
    for written in ["12.6", "12", "\"12.10\"", "'12.10'", "12.6.1", "v12.10", "12.6-rc.1"] {
        assert_eq!(cuda(written).as_deref(), Ok(written.trim_matches(['"', '\''])), "{written}");
    }
    for (written, read_as) in [
        ("12.10", "the number 12.1"),
        ("12.0", "the number 12"),
        ("012", "the number 12"),
        ("1e3", "the number 1000"),
        ("1_000", "the number 1000"),
        ("0x1F", "a number"),
        (".inf", "a number"),
        ("off", "the truth value false"),
        ("~", "nothing"),
    ] {
        let sentence = format!(
            "versions.current.cuda (line 3): {written} without quotes is {read_as} to other programs; write \"{written}\""
        );
        assert_eq!(cuda(written), Err(sentence));
    }
}

#[test]
fn several_problems_are_counted_in_one_sentence() {
    let text = "versions:\n  current: {driver: x, cuda: 12.10, status: no}\n";
    assert_eq!(
        Matrix::parse(text).unwrap_err().to_string(),
        "versions.current.driver (line 2): \"x\" is not a driver version (expected numbers with dots, such as 565.57.01) \
         (and 2 more problems)"
    );
    assert_eq!(Matrix::parse(text).unwrap_err().iter().map(Problem::line).collect::<Vec<_>>(), [Some(2); 3]);
}

#[test]
fn a_driver_is_allowed_by_the_entries_that_list_it() {
    let text = format!("{DOCUMENT}  lab:\n    driver: 565.57.1\n  later:\n    status: planned\n");
    let matrix = matrix(&text);
    let allowed = |text: &str| {
        let names = matrix.allows(&version(text))?;
        Some(names.into_iter().map(EntryName::as_str).collect::<Vec<_>>())
    };
    assert_eq!(allowed("560.35.3"), Some(vec!["current"]));
    assert_eq!(allowed("565.57.01"), Some(vec!["canary", "lab"]));
    assert_eq!(allowed("570.86.15"), None);
}

fn told(changes: &[FieldChange]) -> String {
    let side = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let line = |c: &FieldChange| format!("{} {} → {}", c.field, side(&c.before), side(&c.after));
    changes.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_difference_is_one_of_meaning() {
    let matrix_of = |text: &str| matrix(text);
    let document = matrix_of(DOCUMENT);
    let (current, canary) = (document.current().unwrap(), document.canary().unwrap());
    assert_snapshot!(told(&diff(current, canary)), @r"
    gpu_operator v24.9.0 → v24.12.0
    network_operator v24.7.0 → v24.10.0
    driver 560.35.03 → 565.57.01
    cuda 12.6 → 12.8
    firmware 28.40.1000 → 28.42.1000
    status production → testing
    ");
    let other = matrix_of(
        "versions:\n  current: {gpu_operator: 24.9.0, driver: 560.35.3, owner: a}\n  lab: {driver: 550.90.07}\n",
    );
    assert_snapshot!(told(&diff(current, &other.entries["current"])), @r"
    network_operator v24.7.0 → -
    cuda 12.6 → -
    firmware 28.40.1000 → -
    sriov 4.18.0 → -
    openshift 4.16.23 → -
    status production → -
    owner - → a
    ");
    let changed = document.changes(&other);
    assert_eq!(changed.keys().map(EntryName::as_str).collect::<Vec<_>>(), ["canary", "current", "lab"]);
    assert_eq!(told(&changed["lab"]), "driver - → 550.90.07");
    assert!(document.changes(&document).is_empty());
}

/// The lines that differ, as a patch would show them. Lines are only replaced and added.
fn edits(before: &str, after: &str) -> String {
    let mut old = before.lines().peekable();
    let mut shown = Vec::new();
    for new in after.lines() {
        if old.peek() == Some(&new) {
            old.next();
        } else if let Some(gone) = old.next_if(|line| after.lines().all(|new| new != *line)) {
            shown.push(format!("- {gone}\n+ {new}"));
        } else {
            shown.push(format!("+ {new}"));
        }
    }
    assert_eq!(old.next(), None);
    shown.join("\n")
}

#[test]
fn a_promotion_edits_the_values_and_nothing_else() {
    let promotion = promoted(DOCUMENT).unwrap();
    assert_eq!(promotion.driver, version("565.57.01"));
    assert_snapshot!(edits(DOCUMENT, &promotion.text), @r#"
    -     gpu_operator: "v24.9.0"
    +     gpu_operator: "v24.12.0"
    -     network_operator: "v24.7.0"
    +     network_operator: "v24.10.0"
    -     driver: "560.35.03"
    +     driver: "565.57.01"
    -     cuda: "12.6"
    +     cuda: "12.8"
    -     firmware: "28.40.1000"
    +     firmware: "28.42.1000"
    -     status: "testing"
    +     status: "promoted"
    "#);
}

#[test]
fn comments_order_quotes_and_other_entries_survive_a_promotion() {
    let before = "\
# who to ask: team-x
versions:
  canary:   # on gpu-worker-4
      status: testing  # since Monday
      driver: 565.57.01 # bug 123 is mended there
      cuda: '12.8'
      ticket: \"OPS-17\"
      gpu_operator: v24.12.0
  lab: {driver: 550.90.07}

  current:
    # do not touch at night
    driver:   '560.35.03'   # until May
    firmware: 28.40.1000
    owner: team-x
notes: |
  driver: none
";
    let promotion = promoted(before).unwrap();
    assert_snapshot!(promotion.text, @r#"
    # who to ask: team-x
    versions:
      canary:   # on gpu-worker-4
          status: promoted  # since Monday
          driver: 565.57.01 # bug 123 is mended there
          cuda: '12.8'
          ticket: "OPS-17"
          gpu_operator: v24.12.0
      lab: {driver: 550.90.07}

      current:
        # do not touch at night
        status: production
        driver:   565.57.01   # until May
        cuda: '12.8'
        ticket: "OPS-17"
        gpu_operator: v24.12.0
        firmware: 28.40.1000
        owner: team-x
    notes: |
      driver: none
    "#);
    assert_snapshot!(told(&promotion.changes), @r"
    gpu_operator - → v24.12.0
    driver 560.35.03 → 565.57.01
    cuda - → 12.8
    status - → production
    ticket - → OPS-17
    ");
}

#[test]
fn line_ends_and_a_missing_last_one_stay_as_they_are() {
    let windows = DOCUMENT.replace('\n', "\r\n");
    assert_eq!(promoted(&windows).unwrap().text, promoted(DOCUMENT).unwrap().text.replace('\n', "\r\n"));
    let bare =
        "\u{feff}versions:\r\n  current:\r\n    driver: 560.35.03\r\n  canary:\r\n    driver: 565.57.01";
    assert_eq!(
        promoted(bare).unwrap().text,
        "\u{feff}versions:\r\n  current:\r\n    driver: 565.57.01\r\n    status: \"production\"\r\n  canary:\r\n    \
         driver: 565.57.01\r\n    status: \"promoted\""
    );
}

#[test]
fn what_cannot_be_promoted_says_why() {
    let again = promoted(DOCUMENT).unwrap().text;
    let next =
        again.replace("canary:\n    gpu_operator: \"v24.12.0\"", "canary:\n    gpu_operator: \"v25.3.0\"");
    let with = |extra: &str| DOCUMENT.replace("    status: \"testing\"\n", extra);
    let cases = [
        ("promoted already", again),
        ("a new version in an old trial", next),
        ("no canary", DOCUMENT.replace("canary:", "lab:")),
        ("no driver", DOCUMENT.replace("    driver: \"565.57.01\"\n", "")),
        (
            "flow style",
            "versions:\n  current: {driver: 560.35.03}\n  canary: {driver: 565.57.01}\n".to_owned(),
        ),
        ("a list of our own", with("    notes: [a, b]\n")),
        ("a long text of our own", with("    notes: one\n      two\n")),
        ("no matrix", lost(DOCUMENT)),
    ];
    let told: Vec<String> = cases
        .iter()
        .map(|(what, text)| {
            format!(
                "{what}: {}",
                promoted(text).map_or_else(|e| e.to_string(), |p| format!("promoted\n{}", p.text))
            )
        })
        .collect();
    assert_snapshot!(told.join("\n"), @r#"
    promoted already: versions.canary and versions.current say the same (driver 565.57.01), so there is nothing to promote
    a new version in an old trial: versions.canary has the status "promoted" but differs from versions.current in gpu_operator; set its status to "testing" if that is what it is
    no canary: versions has no entry "canary" (it has current, lab), so there is nothing to promote
    no driver: versions.canary has no driver; write the version that was tried there
    flow style: versions.current (line 2) cannot be edited in place; write each field on a line of its own, as "name: value"
    a list of our own: versions.canary.notes (line 20) cannot be edited in place; write each field on a line of its own, as "name: value"
    a long text of our own: versions.canary.notes (line 20) cannot be edited in place; write each field on a line of its own, as "name: value"
    no matrix: its indentation was lost in copying: "current:" (line 3) stands no deeper than the "versions:" it belongs to; indent each entry under "versions:" by two spaces and its fields by four
    "#);
}

#[test]
fn every_stated_field_agrees_differs_or_says_why_it_cannot_be_seen() {
    let document = matrix(DOCUMENT);
    let entry = document.current().unwrap();
    let show = |observed: &Observed| {
        drift(entry, observed).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    assert_snapshot!(show(&Observed::default()), @r"
    gpu_operator v24.9.0 cannot be observed: no GPU Operator Deployment has the label app.kubernetes.io/version or olm.owner
    network_operator v24.7.0 cannot be observed: no Network Operator Deployment has the label app.kubernetes.io/version or olm.owner
    driver 560.35.03 cannot be observed: no driver image has a version in its tag, and no node the label nvidia.com/cuda.driver-version.full
    cuda 12.6 cannot be observed: no node has the label nvidia.com/cuda.runtime-version.full (GPU Feature Discovery sets it)
    firmware 28.40.1000 cannot be observed: there are no NicDevices (the NIC Configuration Operator makes them)
    sriov 4.18.0 cannot be observed: no SR-IOV Network Operator Deployment has the label olm.owner
    openshift 4.16.23 cannot be observed: there is no ClusterVersion (this is not OpenShift)
    status production cannot be observed: it is a word for people
    ");
    let mut seen = Observed {
        gpu_operator: Some(Release::new("v24.9.0")),
        network_operator: Some(Release::new("v24.10.0")),
        sriov: Release::from_bundle("sriov-network-operator.v4.18.0-202509240837"),
        openshift: Some(Release::new("4.16.23")),
        ..Observed::default()
    };
    for (driver, cuda, firmware) in [
        (Some("560.35.3"), Some("12.6"), Some("28.40.1000")),
        (Some("560.35.03"), Some("12.6"), Some("28.39.1002")),
        (Some("550.90.07"), None, Some("22.31.1014")),
        (None, None, None),
    ] {
        seen.driver.add(driver.map(version));
        seen.cuda.add(cuda.map(Release::new));
        seen.firmware.add(firmware.map(Release::new));
    }
    assert_snapshot!(show(&seen), @r"
    gpu_operator is v24.9.0, as stated
    network_operator is v24.10.0, not v24.7.0
    driver is 550.90.07 on 1 node, not 560.35.03
    cuda is 12.6, as stated; 2 nodes do not show it
    firmware is 28.39.1002 on 1 node, not 28.40.1000
    sriov is 4.18.0, as stated
    openshift is 4.16.23, as stated
    status production cannot be observed: it is a word for people
    ");
    let mut other_family = Observed::default();
    other_family.firmware.add(Some(Release::new("22.31.1014")));
    let firmware =
        drift(entry, &other_family).into_iter().find(|drift| drift.field == Field::Firmware).unwrap();
    assert_eq!(firmware.verdict, Verdict::NotObservable { why: Why::NoAdapterOfFamily(28) });
}

#[test]
fn a_field_that_is_not_stated_cannot_drift() {
    let stated = matrix("versions:\n  current: {driver: 560.35.03, owner: team-x}\n");
    let fields: Vec<Field> =
        drift(stated.current().unwrap(), &Observed::default()).into_iter().map(|drift| drift.field).collect();
    assert_eq!(fields, [Field::Driver]);
}

/// A value in one of the ways in which people write it.
fn written(values: &'static [&'static str]) -> impl Strategy<Value = String> {
    let quotes = prop_oneof![Just(""), Just("'"), Just("\"")];
    (prop::sample::select(values), quotes, prop_oneof![Just(""), Just("  # why: so")])
        .prop_map(|(value, quotes, comment)| format!("{quotes}{value}{quotes}{comment}"))
}

/// The lines of an entry, in any order, some of them missing.
fn fields() -> impl Strategy<Value = String> {
    let line = |key: &'static str, values| {
        prop::option::weighted(0.7, written(values).prop_map(move |value| format!("    {key}: {value}\n")))
    };
    let lines = (
        line("gpu_operator", &["v24.9.0", "v24.12.0"]),
        line("cuda", &["12.6", "12.8"]),
        line("firmware", &["28.40.1000", "28.42.1000"]),
        line("status", &["testing", "production", "promoted"]),
        line("owner", &["team-x", "team-y"]),
        written(&["560.35.03", "565.57.01", "565.57.1"])
            .prop_map(|value| Some(format!("    driver: {value}\n"))),
    );
    let lines =
        lines.prop_map(|(a, b, c, d, e, f)| [a, b, c, d, e, f].into_iter().flatten().collect::<Vec<_>>());
    lines.prop_shuffle().prop_map(|lines| lines.concat())
}

proptest! {
    #[test]
    fn after_a_promotion_current_says_what_canary_says_and_every_other_line_is_the_same(
        current in fields(), canary in fields(), canary_first: bool,
    ) {
        let (current, canary) = (format!("  current:\n{current}"), format!("  canary: # on trial\n{canary}"));
        let (first, second) = if canary_first { (canary, current) } else { (current, canary) };
        let before = format!("# ours\nversions:\n{first}\n  # between\n{second}# end\n");
        let matrix = matrix(&before);
        let Ok(promotion) = promoted(&before) else {
            let same = diff(&Entry { status: None, ..matrix.canary().unwrap().clone() },
                &Entry { status: None, ..matrix.current().unwrap().clone() });
            let stated = |change: &FieldChange| change.before.is_some();
            prop_assert!(
                !same.iter().any(stated) || matrix.canary().unwrap().status.as_deref() == Some(STATUS_PROMOTED)
            );
            return Ok(());
        };
        let after = self::matrix(&promotion.text);
        for (key, text) in matrix.canary().unwrap().stated() {
            if key != "status" {
                prop_assert!(after.current().unwrap().stated().iter().any(|(k, t)| *k == key && Release::new(t) == Release::new(&text)));
            }
        }
        prop_assert_eq!(after.current().unwrap().status.as_deref(), Some(STATUS_PRODUCTION));
        let comments = |text: &str| text.matches('#').count();
        prop_assert_eq!(comments(&before), comments(&promotion.text));
        let again = matches!(promoted(&promotion.text), Err(CannotPromote::Same { .. }));
        prop_assert!(again, "promoted twice");
        let added = promotion.changes.iter().filter(|change| change.before.is_none()).count()
            + usize::from(matrix.canary().unwrap().status.is_none());
        prop_assert_eq!(promotion.text.lines().count(), before.lines().count() + added);
    }

    #[test]
    fn no_text_is_too_strange(text in "[a-z:{}\\[\\]&*!#|>'\"\\-? \t\r\n0-9.é]{0,80}") {
        let text = format!("versions:\n  current:\n    driver: 560.35.03\n{text}");
        let _ = Matrix::parse(&text);
        let _ = promoted(&text.replace("current", "canary"));
        let _ = promoted(&format!("{text}\n  canary:\n    driver: 565.57.01\n"));
    }
}
