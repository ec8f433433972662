//! Hosts with networks of their own: network namespaces around a switch, which can be cut off from
//! it. All of it goes with the room.

use crate::command;
use rustix::process::geteuid;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The switch, as all see it.
const SWITCH_ADDRESS: &str = "10.77.0.1";

/// A switch with hosts around it.
#[derive(Debug)]
pub struct NetRoom {
    name: String,
    hosts: Vec<String>,
}

impl NetRoom {
    /// A room with so many hosts; says why there can be none.
    ///
    /// # Errors
    /// What the system does not let us.
    pub fn new(hosts: u32) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if !geteuid().is_root() {
            return Err("only root makes networks".to_owned());
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("mica-{}-{number}", std::process::id());
        let mut room = Self { name, hosts: Vec::new() };
        let switch = room.switch();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "set", "lo", "up"])?;
        ip(&["-n", &switch, "link", "add", "switch", "type", "bridge"])?;
        let address = format!("{SWITCH_ADDRESS}/24");
        ip(&["-n", &switch, "address", "add", &address, "dev", "switch"])?;
        ip(&["-n", &switch, "link", "set", "switch", "up"])?;
        for number in 0..hosts {
            let host = format!("{}-{number}", room.name);
            ip(&["netns", "add", &host])?;
            room.hosts.push(host.clone());
            let port = port(number);
            let pair = ["link", "add", &port, "type", "veth", "peer", "name", "wire"];
            ip(&[&["-n", &switch], &pair[..], &["netns", &host]].concat())?;
            ip(&["-n", &switch, "link", "set", &port, "master", "switch", "up"])?;
            let address = format!("10.77.0.{}/24", number + 2);
            ip(&["-n", &host, "address", "add", &address, "dev", "wire"])?;
            ip(&["-n", &host, "link", "set", "wire", "up"])?;
        }
        Ok(room)
    }

    /// The namespace of the switch, in which a server can be that all reach.
    pub fn switch(&self) -> String {
        format!("{}-s", self.name)
    }

    /// The address of the switch.
    pub fn address(&self) -> &'static str {
        SWITCH_ADDRESS
    }

    /// The name of a host: also what it is called itself.
    pub fn host(&self, number: usize) -> &str {
        &self.hosts[number]
    }

    /// What runs a program on a host, up to the program itself.
    pub fn on(&self, number: usize) -> Command {
        let host = self.host(number);
        let mut command = within(host);
        command.args(["unshare", "--uts", "sh", "-c"]);
        command.args(["hostname \"$0\" && exec \"$@\"", host]);
        command
    }

    /// Nothing that a host sends arrives any more, and nothing that is sent to it.
    ///
    /// # Panics
    /// If the system does not let us.
    pub fn cut_off(&self, number: u32) {
        self.set(number, "down");
    }

    /// It does again.
    ///
    /// # Panics
    /// As [`Self::cut_off`].
    pub fn join(&self, number: u32) {
        self.set(number, "up");
    }

    fn set(&self, number: u32, state: &str) {
        let (switch, port) = (self.switch(), port(number));
        ip(&["-n", &switch, "link", "set", &port, state]).expect("the wire is there");
    }
}

/// What runs a program in a network namespace, up to the program itself. Not `ip netns exec`: that
/// makes a mount namespace, too, in which what other tests have mounted lives on.
pub(crate) fn within(network: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/run/netns/{network}")).arg("--");
    command
}

impl Drop for NetRoom {
    fn drop(&mut self) {
        for name in self.hosts.iter().cloned().chain([self.switch()]) {
            // It need not have got that far.
            let _ = ip(&["netns", "delete", &name]);
        }
    }
}

fn port(number: u32) -> String {
    format!("port{number}")
}

fn ip(words: &[&str]) -> Result<(), String> {
    let mut ip = Command::new("ip");
    if ip.arg("-V").output().is_err() {
        return Err("ip is missing (Debian: iproute2)".to_owned());
    }
    let said = command::run("ip", words);
    if said.status.success() { Ok(()) } else { Err(said.to_string()) }
}
