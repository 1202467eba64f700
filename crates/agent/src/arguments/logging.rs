//! The flags of Kubernetes' logging library, which manifests of the documented program may pass. They are accepted and have no
//! effect: everything there is to say is said.

use clap::error::Error;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Flags with a value.
const WITH_VALUE: [&str; 11] = [
    "v",
    "vmodule",
    "logging-format",
    "log-flush-frequency",
    "log-text-info-buffer-size",
    "log-json-info-buffer-size",
    "log-dir",
    "log-file",
    "log-file-max-size",
    "log-backtrace-at",
    "stderrthreshold",
];
/// Flags that may stand alone.
const SWITCHES: [&str; 7] = [
    "log-text-split-stream",
    "log-json-split-stream",
    "logtostderr",
    "alsologtostderr",
    "one-output",
    "add-dir-header",
    "skip-headers",
];

/// All of them, and nothing of them is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logging;

impl Args for Logging {
    fn augment_args(command: Command) -> Command {
        let flag = |name: &'static str| Arg::new(name).long(name).hide(true).action(ArgAction::Append);
        let with_value = WITH_VALUE.map(|name| if name == "v" { flag(name).short('v') } else { flag(name) });
        let switches = SWITCHES.map(|name| flag(name).num_args(0..=1).require_equals(true));
        command.args(with_value).args(switches)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Logging {
    fn from_arg_matches(_: &ArgMatches) -> Result<Self, Error> {
        Ok(Self)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), Error> {
        Ok(())
    }
}
