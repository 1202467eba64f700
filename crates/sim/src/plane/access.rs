//! Who speaks to the API server: users with a token each, so that the audit log tells who did what.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde_json::json;

/// A user of the plane. All but [`User::Pitcrew`] are in `system:masters`: the plane shows what a program does, not what
/// it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum User {
    /// A person, and the test itself.
    Admin,
    /// The controller under test, as the service account of the Helm chart: it may do nothing until
    /// [`Plane::grant`](super::Plane::grant) says what.
    Pitcrew,
    /// The actor that renders a ClusterPolicy into DaemonSets.
    Operator,
    /// The simulated kubelets.
    Kubelet,
    /// A benchmark's own load.
    Bench,
    /// The real kube-controller-manager.
    ControllerManager,
    /// The real kube-scheduler.
    Scheduler,
}

impl User {
    const ALL: [User; 7] = [
        User::Admin,
        User::Pitcrew,
        User::Operator,
        User::Kubelet,
        User::Bench,
        User::ControllerManager,
        User::Scheduler,
    ];

    /// The name as the audit log spells it.
    pub fn name(self) -> &'static str {
        match self {
            User::Admin => "admin",
            User::Pitcrew => "system:serviceaccount:gpu-operator:pitcrew",
            User::Operator => "operator",
            User::Kubelet => "kubelet",
            User::Bench => "bench",
            User::ControllerManager => "system:kube-controller-manager",
            User::Scheduler => "system:kube-scheduler",
        }
    }

    fn kubeconfig_name(self) -> String {
        let name = self.name();
        match self {
            User::Admin => "kubeconfig".to_owned(),
            _ => format!("kubeconfig-{}", name.rsplit_once(':').map_or(name, |(_, last)| last)),
        }
    }

    fn groups(self) -> &'static str {
        match self {
            User::Pitcrew => "system:serviceaccounts,system:serviceaccounts:gpu-operator",
            _ => "system:masters",
        }
    }
}

/// What a client needs to know: where the server is, how to trust it, each user's token.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) server: http::Uri,
    pub(super) ca: PathBuf,
    tokens: BTreeMap<User, String>,
    kubeconfigs: BTreeMap<User, PathBuf>,
}

impl Access {
    /// Makes new tokens and writes the token file and one kubeconfig per user into `data`.
    pub(super) fn write(data: &Path, server: http::Uri, ca: PathBuf) -> io::Result<Access> {
        let mut tokens = BTreeMap::new();
        let mut kubeconfigs = BTreeMap::new();
        let mut token_file = String::new();
        for user in User::ALL {
            let token = new_token()?;
            let name = user.name();
            // Writing to a String cannot fail.
            let _ = writeln!(token_file, "{token},{name},{name},\"{}\"", user.groups());
            let path = data.join(user.kubeconfig_name());
            fs::write(&path, kubeconfig(name, &token, &server, &ca))?;
            tokens.insert(user, token);
            kubeconfigs.insert(user, path);
        }
        fs::write(token_file_in(data), token_file)?;
        Ok(Access { server, ca, tokens, kubeconfigs })
    }

    pub(super) fn token(&self, user: User) -> &str {
        &self.tokens[&user]
    }

    pub(super) fn kubeconfig(&self, user: User) -> &Path {
        &self.kubeconfigs[&user]
    }

    pub(super) fn config(&self, user: User) -> kube::Config {
        let mut config = kube::Config::new(self.server.clone());
        config.root_cert_file = Some(self.ca.clone());
        config.auth_info.token = Some(self.token(user).into());
        config.default_retry = false; // A PDB's 429 must reach the planner at once.
        config
    }
}

pub(super) fn token_file_in(data: &Path) -> PathBuf {
    data.join("tokens.csv")
}

/// The plane listens on loopback, where other users of the machine listen too: a token must not be guessed.
fn new_token() -> io::Result<String> {
    let mut random = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(format!("{:032x}", u128::from_le_bytes(random)))
}

/// A kubeconfig is YAML, and JSON is YAML.
fn kubeconfig(user: &str, token: &str, server: &http::Uri, ca: &Path) -> String {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "pitcrew",
            // Without the slash that a `Uri` ends with.
            "cluster": {"server": server.to_string().trim_end_matches('/'), "certificate-authority": ca},
        }],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "pitcrew", "context": {"cluster": "pitcrew", "user": user}}],
        "current-context": "pitcrew",
    });
    format!("{config:#}\n")
}
