//! A real Prometheus as a child process: the machine's own, or the one of Debian's package, which `cargo xtask alerts`
//! unpacks into the cache.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::binaries::cache_dir;
use super::process::Process;

/// Where the programs of Debian's package are, once they are unpacked.
pub fn prometheus_dir() -> PathBuf {
    cache_dir().join("tools/prometheus/usr/bin")
}

/// A Prometheus that scrapes one address every second. It ends when this is dropped, or when we do.
pub struct Prometheus {
    process: Process,
    url: String,
}

impl Prometheus {
    /// The program, if it can be had.
    pub fn find() -> Option<PathBuf> {
        let works = |program: &PathBuf| {
            Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
        };
        [PathBuf::from("prometheus"), prometheus_dir().join("prometheus")].into_iter().find(works)
    }

    /// Starts it, with its data in a directory that is there. It may take a moment until it answers.
    pub fn start(program: &Path, data: &Path, scraped: SocketAddr) -> io::Result<Self> {
        let config = data.join("prometheus.yml");
        let job = format!("{{job_name: pitcrew, static_configs: [{{targets: [\"{scraped}\"]}}]}}");
        fs::write(&config, format!("global: {{scrape_interval: 1s}}\nscrape_configs: [{job}]\n"))?;
        // Free now; a program that takes it before Prometheus does makes the test say that nobody answers.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let arguments = [
            format!("--config.file={}", config.display()),
            format!("--storage.tsdb.path={}", data.join("data").display()),
            format!("--web.listen-address={address}"),
        ];
        let process = Process::start(program, "prometheus", &arguments, data, None)?;
        Ok(Self { process, url: format!("http://{address}") })
    }

    /// Where it answers.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The last lines of its log.
    pub fn last_words(&self) -> String {
        self.process.log_tail()
    }
}
