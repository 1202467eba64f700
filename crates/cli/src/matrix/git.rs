//! The program git, as far as a matrix needs it: one file in its repository. Arguments go to it as a list, never through a
//! shell; what it refuses is told in its own words.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, anyhow, bail};

/// The line in a commit's message by which a promotion is found again. What follows is the driver version.
pub(super) const PROMOTED: &str = "Pitcrew-Promoted:";
/// What `git revert` writes.
const REVERTS: &str = "This reverts commit ";
/// Long enough to be the only one, short enough to be read aloud.
const SHORT: usize = 12;

/// A file in a work tree.
pub(super) struct Repository {
    /// As the user names the file.
    shown: String,
    /// Where the file really is.
    folder: PathBuf,
    name: OsString,
}

/// A commit that promoted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Promoting {
    pub(super) hash: String,
    /// As the message says.
    pub(super) driver: String,
}

impl Promoting {
    pub(super) fn short(&self) -> &str {
        short(&self.hash)
    }
}

/// A hash that people can read.
pub(super) fn short(hash: &str) -> &str {
    hash.get(..SHORT).unwrap_or(hash)
}

impl Repository {
    /// The repository of a file, with links followed: git knows the file, not a link to it.
    pub(super) fn of(file: &Path) -> anyhow::Result<Self> {
        let shown = file.display().to_string();
        let real = file.canonicalize().with_context(|| format!("cannot read {shown}"))?;
        let (Some(folder), Some(name)) = (real.parent(), real.file_name()) else {
            bail!("{shown} is no file");
        };
        let repository = Self { shown, folder: folder.to_owned(), name: name.to_owned() };
        let inside = repository.git(["rev-parse", "--is-inside-work-tree"])?;
        if !inside.status.success() || inside.stdout.trim_ascii() != b"true" {
            bail!("{} is not in the work tree of a Git repository ({})", repository.shown, says(&inside));
        }
        Ok(repository)
    }

    /// Refuses if what is committed is not what is in the file.
    pub(super) fn is_committed(&self) -> anyhow::Result<()> {
        let file =
            [OsStr::new("status"), "--porcelain".as_ref(), "--ignored".as_ref(), "--".as_ref(), &self.name];
        let status = self.done(file, "ask git for the file's status")?;
        match status.get(..2) {
            None => Ok(()),
            Some("??" | "!!") => bail!("{0} is not in Git yet; commit it first: git add -- {0}", self.shown),
            Some(_) => bail!(
                "{0} has changes that are not committed; commit them first, or drop them with: git restore --staged --worktree -- {0}",
                self.shown
            ),
        }
    }

    /// Refuses if something is staged: a revert would mix with it.
    pub(super) fn nothing_is_staged(&self) -> anyhow::Result<()> {
        let staged = self.git(["diff", "--cached", "--quiet"])?;
        match staged.status.code() {
            Some(0) => Ok(()),
            Some(1) => bail!(
                "other changes are staged in this repository; commit them first, or unstage them with: git restore --staged :/"
            ),
            _ => bail!("cannot ask git what is staged: {}", says(&staged)),
        }
    }

    /// The file in a revision.
    pub(super) fn at_revision(&self, revision: &str) -> anyhow::Result<String> {
        let unknown = || anyhow!("{revision} is neither a file nor a Git revision");
        // A revision that begins with a dash would be taken for an option.
        if revision.starts_with('-') {
            return Err(unknown());
        }
        let commit = format!("{revision}^{{commit}}");
        let found = self.git(["rev-parse", "--verify", "--quiet", "--end-of-options", &commit])?;
        if !found.status.success() {
            return Err(unknown());
        }
        let hash = String::from_utf8_lossy(&found.stdout).trim().to_owned();
        let mut object = OsString::from(format!("{hash}:./"));
        object.push(&self.name);
        let shown = self.git([OsStr::new("show"), &object])?;
        if !shown.status.success() {
            bail!("{} is not in {revision}", self.shown);
        }
        String::from_utf8(shown.stdout).with_context(|| format!("{} at {revision} is no text", self.shown))
    }

    /// Commits the file as it is, and nothing that is staged besides; returns the commit.
    pub(super) fn commit(&self, message: &str) -> anyhow::Result<String> {
        let args = [
            OsStr::new("commit"),
            "--quiet".as_ref(),
            "--cleanup=verbatim".as_ref(),
            "--message".as_ref(),
            message.as_ref(),
            "--only".as_ref(),
            "--".as_ref(),
            &self.name,
        ];
        self.done(args, "commit")?;
        self.head()
    }

    /// The newest commit that promoted this file and is still in force.
    pub(super) fn newest_promotion(&self) -> anyhow::Result<Option<Promoting>> {
        let args = [
            OsStr::new("log"),
            "--no-show-signature".as_ref(),
            "-z".as_ref(),
            "--format=%H%n%B".as_ref(),
            "--".as_ref(),
            &self.name,
        ];
        Ok(in_force(&self.done(args, "read the history")?))
    }

    /// Reverts a commit; if that does not work, everything is as before.
    pub(super) fn revert(&self, commit: &str, and_commit: bool) -> anyhow::Result<()> {
        let how = if and_commit { "--no-edit" } else { "--no-commit" };
        let before = self.head()?;
        let reverted = self.git(["revert", how, commit])?;
        let changed = self.head()? != before || self.nothing_is_staged().is_err();
        if reverted.status.success() && changed {
            return Ok(());
        }
        let conflicts = self.done(["diff", "--name-only", "--diff-filter=U"], "look for conflicts")?;
        // A revert that has not begun has nothing to abort; git says so, and it does not matter.
        self.git(["revert", "--abort"])?;
        let left = match self.nothing_is_staged() {
            Ok(()) => "nothing was changed",
            Err(_) => "git revert --abort cleans up",
        };
        let short = short(commit);
        match (conflicts.is_empty(), changed) {
            (false, _) => {
                bail!("{short} cannot be reverted, because later commits changed the same lines; {left}")
            }
            (true, false) if reverted.stderr.is_empty() => {
                bail!("{short} has nothing left to revert: its changes were taken back by hand; {left}")
            }
            (true, _) => bail!("{short} cannot be reverted ({}); {left}", says(&reverted)),
        }
    }

    /// What a revert would change, as a unified diff: made from objects, the work tree is not touched.
    pub(super) fn reverted(&self, commit: &str) -> anyhow::Result<String> {
        // The state before the commit, as a change on top of it: merged with HEAD that is what `git revert` does.
        let (tree, who) =
            (format!("{commit}^^{{tree}}"), ["-c", "user.name=pitcrew", "-c", "user.email=pitcrew"]);
        let undo = [&who[..], &["commit-tree", &tree, "-p", commit, "-m", "revert"]].concat();
        let undo = self.done(undo, "look at the commit")?;
        let merged = self.git(["merge-tree", "--write-tree", "HEAD", undo.trim()])?;
        match merged.status.code() {
            Some(0) => {}
            Some(1) => {
                bail!("{} cannot be reverted, because later commits changed the same lines", short(commit))
            }
            _ => bail!("cannot try the revert ({}); a dry run needs git 2.38 or newer", says(&merged)),
        }
        let tree = String::from_utf8_lossy(&merged.stdout).trim().to_owned();
        self.done(["diff", "--no-color", "--no-ext-diff", "HEAD", &tree], "compare")
    }

    /// The commit that is checked out.
    pub(super) fn head(&self) -> anyhow::Result<String> {
        Ok(self.done(["rev-parse", "HEAD"], "ask git for HEAD")?.trim().to_owned())
    }

    /// Runs git to its good end; returns what it printed.
    fn done<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>, what: &str) -> anyhow::Result<String> {
        let output = self.git(args)?;
        if !output.status.success() {
            bail!("cannot {what}: {}", says(&output));
        }
        String::from_utf8(output.stdout).with_context(|| format!("cannot {what}: git printed no text"))
    }

    fn git<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> anyhow::Result<Output> {
        let mut command = Command::new("git");
        command.arg("-C").arg(&self.folder);
        // A file named `*.yaml` is one file.
        command.args(["--literal-pathspecs", "--no-pager"]).args(args);
        // What git says is quoted in our sentences; an editor or a question would wait for ever.
        command.env("LC_ALL", "C").env("GIT_EDITOR", "true").env("GIT_TERMINAL_PROMPT", "0");
        command.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                anyhow!("the program git is not installed (or not in PATH); install it")
            }
            _ => anyhow!("cannot run git: {error}"),
        })
    }
}

/// The last thing that git complained of.
fn says(output: &Output) -> String {
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("hint:"));
    let line = lines.next().unwrap_or("git said nothing");
    let line = line.strip_prefix("fatal: ").or_else(|| line.strip_prefix("error: ")).unwrap_or(line);
    format!("git: {line}")
}

/// The newest promotion in a log that no later commit has reverted. The log is `hash, newline, message`, newest first,
/// separated by zeros. A revert may itself be reverted, and then what it took back is in force again.
fn in_force(log: &str) -> Option<Promoting> {
    let mut undone: Vec<&str> = Vec::new();
    for record in log.split('\0') {
        let Some((hash, message)) = record.split_once('\n') else { continue };
        if undone.iter().any(|reverted| hash.starts_with(reverted)) {
            continue;
        }
        let reverted = message.lines().find_map(|line| line.strip_prefix(REVERTS));
        if let Some(reverted) = reverted {
            // `<hash>.`, or `<short hash> (<subject>, <date>)` where git is configured so.
            let end = reverted.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(reverted.len());
            undone.extend(reverted.get(..end).filter(|hash| !hash.is_empty()));
            continue;
        }
        // Not only at the end: a squashed branch has its commits' messages one after the other.
        if let Some(driver) = message.lines().find_map(|line| line.strip_prefix(PROMOTED)) {
            return Some(Promoting { hash: hash.to_owned(), driver: driver.trim().to_owned() });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_promotion_in_force_is_found() {
        let promote = |hash: &str, driver: &str| format!("{hash}\nPromote\n\nPitcrew-Promoted: {driver}\n");
        let revert =
            |hash: &str, of: &str| format!("{hash}\nRevert \"Promote\"\n\nThis reverts commit {of}.\n");
        let other = "c0\nNew canary\n".to_owned();
        let find = |log: &[String]| {
            in_force(&log.join("\0")).map(|found| format!("{} {}", found.hash, found.driver))
        };
        let (old, new) = (promote("a1", "560.35.03"), promote("b2", "565.57.01"));
        assert_eq!(find(&[]), None);
        assert_eq!(find(std::slice::from_ref(&other)), None);
        assert_eq!(find(&[other, new.clone(), old.clone()]).as_deref(), Some("b2 565.57.01"));
        assert_eq!(find(&[revert("d3", "b2"), new.clone(), old.clone()]).as_deref(), Some("a1 560.35.03"));
        assert_eq!(find(&[revert("e4", "a1"), revert("d3", "b2"), new.clone(), old.clone()]), None);
        let again = [revert("f5", "d3"), revert("d3", "b2"), new, old];
        assert_eq!(find(&again).as_deref(), Some("b2 565.57.01"));
        let short = "d3\nRevert\n\nThis reverts commit b2 (Promote, 2026-01-01).\n".to_owned();
        assert_eq!(find(&[short, promote("b2c3", "565.57.01")]), None);
        let squashed = "a9\nTrial (#7)\n\n* Promote\n\nPitcrew-Promoted: 1.2\n\n* Words\n".to_owned();
        assert_eq!(find(&[squashed]).as_deref(), Some("a9 1.2"));
    }
}
