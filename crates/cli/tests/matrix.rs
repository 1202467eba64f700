//! `pitcrew matrix` as people call it, on files and in real Git repositories.

#![expect(clippy::unwrap_used, reason = "what these tests do not expect is a failure")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use insta::assert_snapshot;
use serde_json::Value;
use tempfile::TempDir;

const FILE: &str = "gpu-version-matrix.yaml";
const MATRIX: &str = r#"# gpu-version-matrix.yaml (stored in Git)
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
    driver: "565.57.01"   # on gpu-worker-4
    cuda: "12.8"
    firmware: "28.42.1000"
    sriov: "4.18.0"
    openshift: "4.16.23"
    status: "testing"
"#;

/// A folder with a matrix in it, and a person at a prompt there.
struct Desk {
    folder: TempDir,
}

impl Desk {
    fn new(matrix: &str) -> Self {
        let desk = Self { folder: tempfile::tempdir().unwrap() };
        desk.write(FILE, matrix);
        desk
    }

    /// The same in a repository, committed.
    fn in_git(matrix: &str) -> Self {
        let desk = Self::new(matrix);
        desk.git(&["init", "--quiet", "--initial-branch=main"]);
        desk.commit_all("Begin");
        desk
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    fn read(&self) -> String {
        fs::read_to_string(self.path().join(FILE)).unwrap()
    }

    fn commit_all(&self, message: &str) {
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--message", message]);
    }

    fn git(&self, args: &[&str]) -> String {
        let output = self.command("git").args(args).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Away from the tester's own settings, and above the folder there is no repository.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path()).env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
        command.env("GIT_CEILING_DIRECTORIES", self.path().parent().unwrap());
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_SYSTEM", "/dev/null");
        for who in ["AUTHOR", "COMMITTER"] {
            command.env(format!("GIT_{who}_NAME"), "Ann").env(format!("GIT_{who}_EMAIL"), "ann@example.org");
        }
        command
    }

    fn matrix(&self, args: &[&str]) -> Output {
        self.command(env!("CARGO_BIN_EXE_pitcrew")).arg("matrix").args(args).output().unwrap()
    }

    /// What a command that works prints, with commits' names taken out.
    fn says(&self, args: &[&str]) -> String {
        let output = self.matrix(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{args:?}: {output:?}");
        without_hashes(&String::from_utf8(output.stdout).unwrap())
    }

    /// The one sentence of a command that does not work; nothing may have been changed.
    fn refuses(&self, args: &[&str]) -> String {
        let before = self.state();
        let output = self.matrix(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
        assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
        assert_eq!(before, self.state(), "{args:?} changed something");
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        without_hashes(text.trim_end().strip_prefix("pitcrew: ").unwrap())
    }

    /// All that a command could change: the file, and what git sees.
    fn state(&self) -> (String, String) {
        let git = |args: &[&str]| {
            let output = self.command("git").args(args).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let inside = self.path().join(".git").exists();
        let seen = if inside {
            format!(
                "{}{}{}",
                git(&["log", "--format=%H"]),
                git(&["status", "--porcelain=v2", "--branch"]),
                git(&["diff", "HEAD"])
            )
        } else {
            String::new()
        };
        (self.read(), seen)
    }
}

/// Hashes of commits depend on the time.
fn without_hashes(text: &str) -> String {
    let hash = |word: &str| {
        word.len() >= 7 && word.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let mut out = String::new();
    for piece in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let word = piece.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if hash(word) { out += &piece.replace(word, "[hash]") } else { out += piece }
    }
    out
}

#[test]
fn a_good_matrix_is_told_back_with_what_may_be_a_slip() {
    let desk = Desk::new(MATRIX);
    assert_snapshot!(desk.says(&["validate"]), @r"
    ✔ gpu-version-matrix.yaml: 2 entries
      canary  gpu_operator v24.12.0, network_operator v24.10.0, driver 565.57.01, cuda 12.8, firmware 28.42.1000, sriov 4.18.0, openshift 4.16.23, status testing
      current  gpu_operator v24.9.0, network_operator v24.7.0, driver 560.35.03, cuda 12.6, firmware 28.40.1000, sriov 4.18.0, openshift 4.16.23, status production
    ");
    desk.write(
        FILE,
        "versions:\n  current:\n    driver: 560.35.03\n    gpu-operator: v24.9.0\n    owner: team-x\n",
    );
    assert_snapshot!(desk.says(&["validate", FILE]), @r"
    ✔ gpu-version-matrix.yaml: 1 entry
      current  driver 560.35.03
    ! versions.current does not state gpu_operator, network_operator, cuda, firmware, sriov, openshift, status: that is not compared with the cluster
    ! versions.current.gpu-operator is a field of your own: it is kept, and compared with nothing; did you mean gpu_operator?
    ! versions.current.owner is a field of your own: it is kept, and compared with nothing
    ");
    let json: Value = serde_json::from_str(&desk.says(&["validate", "-o", "json"])).unwrap();
    assert_eq!(json["valid"], true);
    assert_eq!(json["entries"]["current"]["driver"], "560.35.03");
    assert_eq!(json["entries"]["current"]["owner"], "team-x");
    assert_eq!(json["notes"].as_array().unwrap().len(), 3);
}

#[test]
fn everything_that_is_wrong_is_told_at_once_with_its_line() {
    let desk = Desk::new(&MATRIX.replace("\"12.8\"", "12.10").replace("\"560.35.03\"", "latest"));
    let output = desk.matrix(&["validate"]);
    assert_eq!(output.status.code(), Some(1));
    assert_snapshot!(String::from_utf8(output.stdout).unwrap(), @r#"
    ✖ gpu-version-matrix.yaml: 2 problems
      versions.current.driver (line 6): "latest" is not a driver version (expected numbers with dots, such as 565.57.01)
      versions.canary.cuda (line 16): 12.10 without quotes is the number 12.1 to other programs; write "12.10"
    "#);
    let output = desk.matrix(&["validate", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["valid"], false);
    assert_eq!([&json["problems"][0]["line"], &json["problems"][1]["line"]], [6, 16]);
}

#[test]
fn a_matrix_that_lost_its_indentation_is_refused_by_every_command() {
    let lost: Vec<&str> = MATRIX.lines().map(str::trim_start).collect();
    let desk = Desk::in_git(&lost.join("\n"));
    let sentence = "its indentation was lost in copying: \"current:\" (line 3) stands no deeper than the \"versions:\" it \
                    belongs to; indent each entry under \"versions:\" by two spaces and its fields by four";
    let output = desk.matrix(&["validate"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains(sentence));
    assert_eq!(desk.refuses(&["diff"]), format!("{FILE} is not a version matrix: {sentence}"));
    assert_eq!(desk.refuses(&["promote", "--commit"]), format!("{FILE} cannot be promoted: {sentence}"));
}

#[test]
fn a_diff_shows_what_a_promotion_would_change() {
    let desk = Desk::new(MATRIX);
    assert_snapshot!(desk.says(&["diff"]), @r"
    current → canary
      gpu_operator      v24.9.0    → v24.12.0
      network_operator  v24.7.0    → v24.10.0
      driver            560.35.03  → 565.57.01
      cuda              12.6       → 12.8
      firmware          28.40.1000 → 28.42.1000
      status            production → testing
    ");
    let json: Value = serde_json::from_str(&desk.says(&["diff", "-o", "json"])).unwrap();
    assert_eq!(json["before"], "current");
    let driver =
        &json["changes"].as_array().unwrap().iter().find(|change| change["field"] == "driver").unwrap();
    assert_eq!((driver["before"].as_str(), driver["after"].as_str()), (Some("560.35.03"), Some("565.57.01")));
    desk.write(FILE, "versions:\n  current:\n    driver: 560.35.03\n");
    assert_snapshot!(desk.refuses(&["diff"]), @"gpu-version-matrix.yaml has no versions.canary to compare with; name something with --against REV|FILE2");
}

#[test]
fn a_diff_against_a_file_or_a_revision_shows_each_entry() {
    let desk = Desk::in_git(MATRIX);
    let next = MATRIX.replace("565.57.01", "570.86.15").replace("    firmware: \"28.42.1000\"\n", "");
    desk.write("other.yaml", &next);
    assert_eq!(desk.says(&["diff", "--against", "HEAD"]), format!("HEAD and {FILE} say the same\n"));
    assert_snapshot!(desk.says(&["diff", "--against", "other.yaml"]), @r"
    other.yaml → gpu-version-matrix.yaml
      canary.driver    570.86.15    → 565.57.01
      canary.firmware  (not stated) → 28.42.1000
    ");
    desk.write(FILE, &next);
    assert_snapshot!(desk.says(&["diff", "--against", "HEAD"]), @r"
    HEAD → gpu-version-matrix.yaml
      canary.driver    565.57.01  → 570.86.15
      canary.firmware  28.42.1000 → (not stated)
    ");
    let refused: Vec<String> = ["HEAD~7", "--output=x", "no-such"]
        .iter()
        .map(|rev| desk.refuses(&["diff", &format!("--against={rev}")]))
        .collect();
    assert_snapshot!(refused.join("\n"), @r"
    HEAD~7 is neither a file nor a Git revision
    --output=x is neither a file nor a Git revision
    no-such is neither a file nor a Git revision
    ");
    assert_snapshot!(desk.refuses(&["diff", "other.yaml", "--against", "HEAD"]), @"other.yaml is not in HEAD");
}

#[test]
fn a_promotion_without_a_commit_changes_the_file_only() {
    let desk = Desk::new(MATRIX);
    assert_snapshot!(desk.says(&["promote", "--dry-run"]), @r#"
    (dry run, nothing was changed)
    --- a/gpu-version-matrix.yaml
    +++ b/gpu-version-matrix.yaml
    @@ -1,11 +1,11 @@
     # gpu-version-matrix.yaml (stored in Git)
     versions:
       current:
    -    gpu_operator: "v24.9.0"
    -    network_operator: "v24.7.0"
    -    driver: "560.35.03"
    -    cuda: "12.6"
    -    firmware: "28.40.1000"
    +    gpu_operator: "v24.12.0"
    +    network_operator: "v24.10.0"
    +    driver: "565.57.01"
    +    cuda: "12.8"
    +    firmware: "28.42.1000"
         sriov: "4.18.0"
         openshift: "4.16.23"
         status: "production"
    @@ -17,4 +17,4 @@
         firmware: "28.42.1000"
         sriov: "4.18.0"
         openshift: "4.16.23"
    -    status: "testing"
    +    status: "promoted"
    "#);
    assert_eq!(desk.read(), MATRIX, "a dry run changed the file");
    assert_snapshot!(desk.says(&["promote"]), @r#"gpu-version-matrix.yaml: canary is current now: gpu_operator v24.9.0 → v24.12.0, network_operator v24.7.0 → v24.10.0, driver 560.35.03 → 565.57.01, cuda 12.6 → 12.8, firmware 28.40.1000 → 28.42.1000. Not committed yet: git commit -m "Promote driver 565.57.01" -m "Pitcrew-Promoted: 565.57.01" -- gpu-version-matrix.yaml"#);
    assert!(desk.read().contains("    driver: \"565.57.01\"\n"), "{}", desk.read());
    assert!(desk.read().contains("   # on gpu-worker-4\n"));
    assert_snapshot!(desk.refuses(&["promote"]), @"gpu-version-matrix.yaml cannot be promoted: versions.canary and versions.current say the same (driver 565.57.01), so there is nothing to promote");
}

#[test]
fn a_promotion_is_committed_and_a_rollback_reverts_it() {
    let desk = Desk::in_git(MATRIX);
    desk.write("other.txt", "work of somebody else\n");
    desk.git(&["add", "other.txt"]);
    assert_snapshot!(desk.says(&["promote", "--commit"]), @"gpu-version-matrix.yaml: canary is current now: gpu_operator v24.9.0 → v24.12.0, network_operator v24.7.0 → v24.10.0, driver 560.35.03 → 565.57.01, cuda 12.6 → 12.8, firmware 28.40.1000 → 28.42.1000. Committed as [hash]. Undo with: pitcrew matrix rollback gpu-version-matrix.yaml --commit");
    assert_snapshot!(desk.git(&["log", "-1", "--format=%B"]), @r"
    Promote driver 565.57.01 in gpu-version-matrix.yaml

    canary becomes current:
    - gpu_operator v24.9.0 → v24.12.0
    - network_operator v24.7.0 → v24.10.0
    - driver 560.35.03 → 565.57.01
    - cuda 12.6 → 12.8
    - firmware 28.40.1000 → 28.42.1000

    Pitcrew-Promoted: 565.57.01
    ");
    assert_eq!(
        desk.git(&["show", "--name-only", "--format=", "HEAD"]).trim(),
        FILE,
        "it committed something else too"
    );
    let promoted = desk.read();
    assert_ne!(promoted, MATRIX);

    assert_snapshot!(desk.refuses(&["rollback", "--commit"]), @"other changes are staged in this repository; commit them first, or unstage them with: git restore --staged :/");
    desk.commit_all("Something else");
    assert_snapshot!(desk.says(&["rollback", "--dry-run"]), @r#"
    (dry run, nothing was changed) git revert [hash]
    diff --git a/gpu-version-matrix.yaml b/gpu-version-matrix.yaml
    index [hash]..[hash] 100644
    --- a/gpu-version-matrix.yaml
    +++ b/gpu-version-matrix.yaml
    @@ -1,11 +1,11 @@
     # gpu-version-matrix.yaml (stored in Git)
     versions:
       current:
    -    gpu_operator: "v24.12.0"
    -    network_operator: "v24.10.0"
    -    driver: "565.57.01"
    -    cuda: "12.8"
    -    firmware: "28.42.1000"
    +    gpu_operator: "v24.9.0"
    +    network_operator: "v24.7.0"
    +    driver: "560.35.03"
    +    cuda: "12.6"
    +    firmware: "28.40.1000"
         sriov: "4.18.0"
         openshift: "4.16.23"
         status: "production"
    @@ -17,4 +17,4 @@ versions:
         firmware: "28.42.1000"
         sriov: "4.18.0"
         openshift: "4.16.23"
    -    status: "promoted"
    +    status: "testing"
    "#);
    assert_eq!(desk.read(), promoted, "a dry run changed the file");
    assert_snapshot!(desk.says(&["rollback", "--commit"]), @"gpu-version-matrix.yaml: the promotion of driver 565.57.01 ([hash]) is reverted, current is driver 560.35.03. Committed as [hash].");
    assert_eq!(desk.read(), MATRIX);
    assert_eq!(desk.git(&["status", "--porcelain"]), "");
    assert_eq!(
        desk.git(&["log", "-1", "--format=%s"]).trim(),
        format!("Revert \"Promote driver 565.57.01 in {FILE}\"")
    );
    // What is reverted is not reverted twice.
    assert_snapshot!(desk.refuses(&["rollback", "--commit"]), @r#"no commit in the history of gpu-version-matrix.yaml promoted it and is still in force (looked for the line "Pitcrew-Promoted:" that pitcrew matrix promote --commit writes); git log -- gpu-version-matrix.yaml shows what there is to revert"#);
    // And it can be promoted again, in one's own words.
    desk.says(&["promote", "--commit", "--message", "It was the cable"]);
    assert_snapshot!(desk.git(&["log", "-1", "--format=%B"]), @r"
    It was the cable

    Pitcrew-Promoted: 565.57.01
    ");
    desk.says(&["rollback", "--commit"]);
    assert_eq!(desk.read(), MATRIX);
}

#[test]
fn a_rollback_without_a_commit_is_staged_for_one() {
    let desk = Desk::in_git(MATRIX);
    desk.says(&["promote", "--commit"]);
    assert_snapshot!(desk.says(&["rollback"]), @"gpu-version-matrix.yaml: the promotion of driver 565.57.01 ([hash]) is reverted, current is driver 560.35.03. Staged, not committed yet: git commit --no-edit (or leave it with: git revert --abort)");
    assert_eq!(desk.read(), MATRIX);
    assert_eq!(desk.git(&["log", "--format=%s"]).lines().count(), 2);
    desk.git(&["commit", "--quiet", "--no-edit"]);
    assert!(desk.git(&["log", "-1", "--format=%B"]).contains("This reverts commit "));
    assert!(desk.refuses(&["rollback"]).starts_with("no commit in the history"));
}

#[test]
fn a_rollback_that_conflicts_changes_nothing() {
    let desk = Desk::in_git(MATRIX);
    desk.says(&["promote", "--commit"]);
    let next = desk.read().replacen("driver: \"565.57.01\"", "driver: \"570.86.15\"", 1);
    desk.write(FILE, &next);
    desk.commit_all("By hand");
    assert_snapshot!(desk.refuses(&["rollback", "--commit"]), @"[hash] cannot be reverted, because later commits changed the same lines; nothing was changed");
    assert_snapshot!(desk.refuses(&["rollback"]), @"[hash] cannot be reverted, because later commits changed the same lines; nothing was changed");
    assert_snapshot!(desk.refuses(&["rollback", "--dry-run"]), @"[hash] cannot be reverted, because later commits changed the same lines");
}

#[test]
fn a_promotion_that_was_taken_back_by_hand_is_not_reverted_again() {
    let desk = Desk::in_git(MATRIX);
    desk.says(&["promote", "--commit"]);
    desk.write(FILE, MATRIX);
    desk.commit_all("Back, by hand");
    assert_snapshot!(desk.refuses(&["rollback", "--commit"]), @"[hash] has nothing left to revert: its changes were taken back by hand; nothing was changed");
    assert_snapshot!(desk.refuses(&["rollback"]), @"[hash] has nothing left to revert: its changes were taken back by hand; nothing was changed");
}

#[test]
fn a_new_trial_after_the_promotion_survives_a_rollback_of_another_place() {
    let desk = Desk::in_git(&format!(
        "{MATRIX}  lab:\n    driver: 550.90.07\n    cuda: 12.4\n    status: testing\n"
    ));
    desk.says(&["promote", "--commit"]);
    desk.write(FILE, &desk.read().replace("550.90.07", "550.144.03"));
    desk.commit_all("Lab moves on");
    desk.says(&["rollback", "--commit"]);
    assert_eq!(
        desk.read(),
        format!("{MATRIX}  lab:\n    driver: 550.144.03\n    cuda: 12.4\n    status: testing\n")
    );
}

#[test]
fn what_git_cannot_do_is_one_sentence_and_changes_nothing() {
    let desk = Desk::new(MATRIX);
    let mut told = vec![
        desk.refuses(&["promote", "--commit"]),
        desk.refuses(&["rollback", "--commit"]),
        desk.refuses(&["diff", "--against", "HEAD"]),
    ];
    desk.git(&["init", "--quiet", "--initial-branch=main"]);
    told.push(desk.refuses(&["promote", "--commit"]));
    desk.commit_all("Begin");
    told.push(desk.refuses(&["rollback", "--commit"]));
    desk.write(FILE, &MATRIX.replace("12.8", "12.9"));
    told.push(desk.refuses(&["promote", "--commit"]));
    told.push(desk.refuses(&["rollback", "--commit"]));
    told.push(desk.refuses(&["promote", "no-such.yaml"]));
    assert_snapshot!(told.join("\n"), @r#"
    gpu-version-matrix.yaml is not in the work tree of a Git repository (git: not a git repository (or any of the parent directories): .git)
    gpu-version-matrix.yaml is not in the work tree of a Git repository (git: not a git repository (or any of the parent directories): .git)
    gpu-version-matrix.yaml is not in the work tree of a Git repository (git: not a git repository (or any of the parent directories): .git)
    gpu-version-matrix.yaml is not in Git yet; commit it first: git add -- gpu-version-matrix.yaml
    no commit in the history of gpu-version-matrix.yaml promoted it and is still in force (looked for the line "Pitcrew-Promoted:" that pitcrew matrix promote --commit writes); git log -- gpu-version-matrix.yaml shows what there is to revert
    gpu-version-matrix.yaml has changes that are not committed; commit them first, or drop them with: git restore --staged --worktree -- gpu-version-matrix.yaml
    gpu-version-matrix.yaml has changes that are not committed; commit them first, or drop them with: git restore --staged --worktree -- gpu-version-matrix.yaml
    cannot read no-such.yaml: No such file or directory (os error 2)
    "#);
}

#[test]
fn a_commit_that_a_hook_refuses_leaves_the_file_as_it_was() {
    use std::os::unix::fs::PermissionsExt as _;
    let desk = Desk::in_git(MATRIX);
    let hook = desk.path().join(".git/hooks/pre-commit");
    fs::create_dir_all(hook.parent().unwrap()).unwrap();
    fs::write(&hook, "#!/bin/sh\necho 'not on a Friday' >&2\nexit 1\n").unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    assert_snapshot!(desk.refuses(&["promote", "--commit"]), @"gpu-version-matrix.yaml was not promoted, and is as it was: cannot commit: git: not on a Friday");
}

#[test]
fn without_git_a_commit_is_refused_and_the_rest_works() {
    let desk = Desk::in_git(MATRIX);
    let run = |args: &[&str]| {
        let mut command = desk.command(env!("CARGO_BIN_EXE_pitcrew"));
        command.env("PATH", "/nonexistent").arg("matrix").args(args).output().unwrap()
    };
    let output = run(&["promote", "--commit"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "pitcrew: the program git is not installed (or not in PATH); install it\n"
    );
    assert_eq!(desk.read(), MATRIX);
    assert_eq!(run(&["promote"]).status.code(), Some(0));
    assert_ne!(desk.read(), MATRIX);
}

#[test]
fn names_that_git_could_take_for_something_else_are_files() {
    let desk = Desk::in_git(MATRIX);
    desk.write("*.yaml", MATRIX);
    desk.commit_all("A strange name");
    desk.says(&["promote", "*.yaml", "--commit"]);
    assert_eq!(desk.git(&["show", "--name-only", "--format=", "HEAD"]).trim(), "*.yaml");
    assert_eq!(desk.read(), MATRIX, "the other matrix was changed");
    desk.says(&["rollback", "*.yaml", "--commit"]);
    assert_eq!(fs::read_to_string(desk.path().join("*.yaml")).unwrap(), MATRIX);
    assert!(desk.refuses(&["rollback", "--commit"]).starts_with("no commit in the history"));
}

#[test]
fn a_link_to_the_matrix_is_the_matrix() {
    let desk = Desk::in_git(MATRIX);
    std::os::unix::fs::symlink(FILE, desk.path().join("link.yaml")).unwrap();
    desk.commit_all("A link");
    desk.says(&["promote", "link.yaml", "--commit"]);
    assert_eq!(desk.git(&["show", "--name-only", "--format=", "HEAD"]).trim(), FILE);
    assert!(fs::symlink_metadata(desk.path().join("link.yaml")).unwrap().is_symlink());
}

#[test]
fn wrong_usage_is_one_sentence_and_2() {
    let desk = Desk::new(MATRIX);
    for (args, expected) in [
        (vec!["promote", "--message", "x"], "required arguments were not provided"),
        (vec!["promote", "--commit", "--message", ""], "a value is required for '--message <TEXT>'"),
        (vec!["validate", "-o", "yaml"], "invalid value 'yaml'"),
        (vec!["rollback", "a", "b"], "unexpected argument 'b' found"),
        (vec!["frobnicate"], "unrecognized subcommand 'frobnicate'"),
    ] {
        let output = desk.matrix(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.lines().count() == 1 && text.contains(expected), "{args:?}: {text}");
    }
    assert_eq!(desk.read(), MATRIX);
}
