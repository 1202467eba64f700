//! A machine in memory, for tests and simulations: modules with users, mounts over mounts, processes, devices, and
//! everything that goes wrong with them.
//!
//! Every call is written down. At a chosen call the machine "dies": the call never returns and whoever waits on
//! [`FakeHost::died`] may drop the agent, as `kill -9` would.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::host::{
    Holder, Holders, Host, HostError, HostResult, KernelPaths, Module, Modules, PciDevice, Ran,
};

/// `EAGAIN`, which is what removing a busy module without waiting says.
const BUSY: i32 = 11;

/// A driver that is installed on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostDriver {
    /// None.
    #[default]
    Absent,
    /// This version.
    Version(String),
    /// Its `nvidia-smi` ends like this: exit code, none after a signal, and output.
    Ends(Option<i32>, String),
    /// One that does not answer.
    Hangs,
}

/// What is on the machine. Tests change it as they like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The loaded modules by name, each with the modules that use it.
    pub modules: BTreeMap<String, BTreeSet<String>>,
    /// Processes with open device files, and the modules that each keeps busy by that.
    pub processes: Vec<(Holder, Vec<String>)>,
    /// So many processes that may not be looked at.
    pub hidden: usize,
    /// Mount points in the order of mounting.
    pub mounts: Vec<String>,
    /// Files by path.
    pub files: BTreeMap<String, String>,
    /// PCI devices.
    pub devices: Vec<PciDevice>,
    /// The host's own driver.
    pub host_driver: HostDriver,
    /// When this module is removed, a process takes hold of that one: removed, held.
    pub grabbed: Option<(String, String)>,
    /// A module that somebody else removes in the moment before the agent does.
    pub vanishing: Option<String>,
    /// What somebody else unmounts in the moment before the agent does.
    pub unmounted: Option<String>,
    /// Calls that fail, as they are written down.
    pub failing: BTreeSet<String>,
    /// Programs that modprobe can load: module, the driver's name on the bus.
    pub loadable: BTreeMap<String, String>,
    /// modprobe does not end.
    pub modprobe_hangs: bool,
    /// `/proc` cannot be read.
    pub no_proc: bool,
}

impl Machine {
    /// A machine with a whole driver: modules, root directory, PID file, and the digest of its configuration.
    pub fn with_driver(digest: &str) -> Self {
        let mut machine = Self { mounts: vec!["/".to_owned(), "/run".to_owned()], ..Self::default() };
        machine.install(digest);
        machine
    }

    /// A driver container loads its driver: modules, root directory, PID file, and the digest of its configuration.
    pub fn install(&mut self, digest: &str) {
        for (name, users) in [
            ("nvidia", &["nvidia_modeset", "nvidia_uvm"][..]),
            ("nvidia_modeset", &["nvidia_drm"]),
            ("nvidia_drm", &[]),
            ("nvidia_uvm", &[]),
        ] {
            self.modules.insert(name.to_owned(), users.iter().map(|user| (*user).to_owned()).collect());
        }
        for mount in ["/run/nvidia/driver", "/run/nvidia/driver/dev"] {
            self.mounts.push(mount.to_owned());
        }
        self.file("/run/nvidia/nvidia-driver.pid", "4711");
        self.file("/run/nvidia/nvidia-driver.state", digest);
    }

    /// Puts a file there.
    pub fn file(&mut self, path: &str, text: &str) {
        self.files.insert(path.to_owned(), text.to_owned());
    }

    /// Loads a module that uses another one.
    pub fn load(&mut self, name: &str, uses: Option<&str>) {
        self.modules.entry(name.to_owned()).or_default();
        if let Some(used) = uses {
            self.modules.entry(used.to_owned()).or_default().insert(name.to_owned());
        }
    }

    /// A process opens a device file.
    pub fn open(&mut self, pid: u32, command: &str, file: &str, modules: &[&str]) {
        let holder = Holder { pid, command: command.to_owned(), files: BTreeSet::from([file.to_owned()]) };
        self.processes.push((holder, modules.iter().map(|module| (*module).to_owned()).collect()));
    }

    /// References on a module: of modules, and of processes.
    fn references(&self, name: &str) -> i64 {
        let users = self.modules.get(name).map_or(0, BTreeSet::len);
        let twice = usize::from(name == "nvidia" && self.modules.contains_key("nvidia_vgpu_vfio"));
        let open = self.processes.iter().filter(|(_, modules)| modules.iter().any(|m| m == name)).count();
        i64::try_from(users + twice + open).unwrap_or(i64::MAX)
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        if !self.modules.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if self.references(name) > 0 {
            return Err(io::Error::from_raw_os_error(BUSY));
        }
        self.modules.remove(name);
        for users in self.modules.values_mut() {
            users.remove(name);
        }
        if let Some((_, held)) = self.grabbed.take_if(|(removed, _)| removed == name) {
            self.open(666, "latecomer", "/dev/nvidia0", &[&held]);
        }
        Ok(())
    }

    fn unmount(&mut self, mount_point: &str) -> io::Result<()> {
        let last = self.mounts.iter().rposition(|mount| mount == mount_point);
        let below = format!("{mount_point}/");
        // What was mounted below it later is mounted on it.
        let later = self.mounts.split_off(last.ok_or(io::ErrorKind::InvalidInput)?);
        self.mounts.extend(later.into_iter().skip(1).filter(|mount| !mount.starts_with(&below)));
        Ok(())
    }

    /// What writing into a file of the kernel does.
    fn write(&mut self, path: &str, text: &str) {
        let device = path.strip_prefix("/sys/bus/pci/devices/").and_then(|rest| rest.split_once('/'));
        if let Some((address, "driver/unbind")) = device {
            return self.bound(address, None);
        }
        let driver = path.strip_prefix("/sys/bus/pci/drivers/").and_then(|rest| rest.strip_suffix("/bind"));
        if let Some(driver) = driver {
            return self.bound(text, Some(driver));
        }
        self.file(path, text);
    }

    /// A virtual machine holds the device, and the kernel waits until it gives it up.
    fn is_held(&self, path: &str) -> bool {
        let device =
            path.strip_prefix("/sys/bus/pci/devices/").and_then(|rest| rest.strip_suffix("/driver/unbind"));
        let device = self.devices.iter().find(|known| device == Some(&known.address));
        let files = device.map(|device| &device.vfio_files);
        files
            .into_iter()
            .flatten()
            .any(|file| self.processes.iter().any(|(holder, _)| holder.files.contains(file)))
    }

    fn bound(&mut self, address: &str, driver: Option<&str>) {
        for device in self.devices.iter_mut().filter(|device| device.address == address) {
            device.driver = driver.map(str::to_owned);
        }
    }

    fn exists(&self, path: &str) -> bool {
        let below = format!("{path}/");
        let on_bus = path.strip_prefix("/sys/bus/pci/drivers/");
        let driver = |name: &str| self.loadable.values().any(|known| known == name);
        self.files.keys().any(|file| file == path || file.starts_with(&below)) || on_bus.is_some_and(driver)
    }
}

/// When the machine dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// At which call, the first being 1.
    pub at: usize,
    /// After the call has done what it does, or before.
    pub after: bool,
}

/// A machine in memory.
#[derive(Debug, Default)]
pub struct FakeHost {
    machine: Mutex<Machine>,
    calls: Mutex<Vec<String>>,
    death: Mutex<Option<Death>>,
    died: Notify,
}

impl FakeHost {
    /// With this on it.
    pub fn new(machine: Machine) -> Self {
        let host = Self { machine: Mutex::new(machine), ..Self::default() };
        host.change(|machine| {
            machine
                .files
                .entry("/proc/sys/kernel/random/boot_id".to_owned())
                .or_insert("boot-1\n".to_owned());
            machine.files.entry("/host/etc/os-release".to_owned()).or_default();
        });
        host
    }

    /// What is on it now.
    pub fn machine(&self) -> Machine {
        lock(&self.machine).clone()
    }

    /// Changes what is on it.
    pub fn change(&self, change: impl FnOnce(&mut Machine)) {
        change(&mut lock(&self.machine));
    }

    /// What it was asked, in order.
    pub fn calls(&self) -> Vec<String> {
        lock(&self.calls).clone()
    }

    /// Lets the machine die at a call, counted from now on; or live.
    pub fn dies(&self, death: Option<Death>) {
        lock(&self.calls).clear();
        *lock(&self.death) = death;
    }

    /// Returns when the machine has died.
    pub async fn died(&self) {
        self.died.notified().await;
    }

    async fn call<T>(&self, name: String, act: impl FnOnce(&mut Machine) -> io::Result<T>) -> HostResult<T> {
        let number = {
            let mut calls = lock(&self.calls);
            calls.push(name.clone());
            calls.len()
        };
        let death = lock(&self.death).filter(|death| death.at == number);
        if death.is_some_and(|death| !death.after) {
            self.die().await;
        }
        let result = {
            let machine = &mut lock(&self.machine);
            let fails = machine.failing.contains(&name);
            if fails { Err(io::ErrorKind::PermissionDenied.into()) } else { act(machine) }
        };
        let result = result.map_err(|error| HostError::new(name, error));
        if death.is_some() {
            self.die().await;
        }
        result
    }

    /// Whoever works on it is killed now.
    pub fn kill(&self) {
        self.died.notify_one();
    }

    async fn die(&self) {
        *lock(&self.death) = None;
        self.kill();
        std::future::pending::<()>().await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host for FakeHost {
    async fn modules(&self, paths: &KernelPaths) -> HostResult<Modules> {
        self.call(format!("read {}/modules", paths.proc), |machine| {
            if machine.no_proc {
                return Err(io::ErrorKind::NotFound.into());
            }
            let module = |(name, users): (&String, &BTreeSet<String>)| {
                (name.clone(), Module { references: machine.references(name), holders: users.clone() })
            };
            Ok(machine.modules.iter().map(module).collect())
        })
        .await
    }

    async fn remove_module(&self, name: &str) -> HostResult<()> {
        self.call(format!("remove module {name}"), |machine| {
            if machine.vanishing.take_if(|vanishing| vanishing == name).is_some() {
                machine.remove(name)?;
            }
            machine.remove(name)
        })
        .await
    }

    async fn mounts(&self) -> HostResult<Vec<String>> {
        self.call("read mounts".to_owned(), |machine| Ok(machine.mounts.clone())).await
    }

    async fn detach(&self, mount_point: &str) -> HostResult<()> {
        self.call(format!("unmount {mount_point}"), |machine| {
            if machine.unmounted.take_if(|unmounted| unmounted == mount_point).is_some() {
                machine.unmount(mount_point)?;
            }
            machine.unmount(mount_point)
        })
        .await
    }

    async fn holders(&self, prefix: &str) -> HostResult<Holders> {
        self.call(format!("look who has {prefix}* open"), |machine| {
            let open = |holder: &Holder| holder.files.iter().any(|file| file.starts_with(prefix));
            let seen = machine.processes.iter().map(|(holder, _)| holder.clone()).filter(open).collect();
            Ok(Holders { seen, hidden: machine.hidden })
        })
        .await
    }

    async fn pci_devices(&self) -> HostResult<Vec<PciDevice>> {
        self.call("list PCI devices".to_owned(), |machine| Ok(machine.devices.clone())).await
    }

    async fn run(&self, root: &str, command: &[&str], limit: Duration) -> HostResult<Ran> {
        let ran = self.call(format!("run {} in {root}", command.join(" ")), |machine| {
            Ok(match (command, &machine.host_driver) {
                (["modprobe", _], _) if machine.modprobe_hangs => Ran::TimedOut,
                (["modprobe", name], _) => {
                    let code = i32::from(!machine.loadable.contains_key(*name));
                    Ran::Ended { code: Some(code), output: String::new() }
                }
                (_, HostDriver::Absent) => Ran::NotStarted,
                (_, HostDriver::Version(version)) => {
                    Ran::Ended { code: Some(0), output: format!("{version}\n") }
                }
                (_, HostDriver::Ends(code, output)) => Ran::Ended { code: *code, output: output.clone() },
                (_, HostDriver::Hangs) => Ran::TimedOut,
            })
        });
        let ran = ran.await?;
        if ran == Ran::TimedOut {
            tokio::time::sleep(limit).await;
        }
        Ok(ran)
    }

    async fn read(&self, path: &str) -> HostResult<Option<String>> {
        self.call(format!("read {path}"), |machine| Ok(machine.files.get(path).cloned())).await
    }

    async fn exists(&self, path: &str) -> HostResult<bool> {
        self.call(format!("look for {path}"), |machine| Ok(machine.exists(path))).await
    }

    async fn write(&self, path: &str, text: &str) -> HostResult<()> {
        if lock(&self.machine).is_held(path) {
            std::future::pending::<()>().await;
        }
        self.call(format!("write {path}"), |machine| {
            machine.write(path, text);
            Ok(())
        })
        .await
    }

    async fn remove(&self, path: &str) -> HostResult<()> {
        self.call(format!("remove {path}"), |machine| {
            machine.files.remove(path);
            Ok(())
        })
        .await
    }
}
