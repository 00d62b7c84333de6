//! GPUs: the needs of copies between engines' GPU memory and a node, as far as they can be checked without touching a GPU.

use super::{Finding, Subject, note, ok};

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let mut findings = vec![driver(subject)];
    // Without a configured GPU or a driver, the other checks would add nothing.
    if !subject.config.gpus.is_empty() && subject.files.text(VERSION).is_some() {
        findings.extend([library(subject), device_files(subject), sharing(subject), links(subject)]);
    }
    findings
}

fn driver(subject: &Subject) -> Finding {
    const CHECK: &str = "GPU";
    let gpus = subject.host.pci.values().filter(|device| device.is_display).count();
    let Some(version) = subject.files.text(VERSION) else {
        if subject.config.gpus.is_empty() {
            return ok(CHECK, format!("no NVIDIA driver; {gpus} display controllers"));
        }
        return note(
            CHECK,
            "the configuration names GPUs, and no NVIDIA driver is loaded",
            "load the driver if engines use these GPUs; the node itself needs none",
        );
    };
    let line = version.lines().next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
    match major(&line) {
        Some(major) if major < OLDEST => note(
            CHECK,
            format!("the driver is of version {major}: {line}"),
            format!("the kernels of the GPU lane need {OLDEST} (CUDA 13.0) or newer"),
        ),
        _ => ok(CHECK, format!("a driver is loaded: {line}")),
    }
}

/// Checks the driver's library. It comes with the driver, and into a container only when it is asked for.
fn library(subject: &Subject) -> Finding {
    const CHECK: &str = "CUDA";
    match &subject.probes.cuda {
        Ok(()) => ok(CHECK, "the driver's library is found, with all functions that copies need"),
        Err(reason) => note(
            CHECK,
            reason.clone(),
            "for the GPU lane, give the container the driver's libraries (NVIDIA_DRIVER_CAPABILITIES=compute)",
        ),
    }
}

fn device_files(subject: &Subject) -> Finding {
    const CHECK: &str = "GPU devices";
    let missing: Vec<&str> =
        DEVICES.iter().copied().filter(|device| !subject.files.is_there(device)).collect();
    if missing.is_empty() {
        return ok(CHECK, "this process sees the driver's device files");
    }
    note(
        CHECK,
        format!("this process does not see /{}", missing.join(", /")),
        "for the GPU lane, give the container the GPUs (NVIDIA_VISIBLE_DEVICES, or the device plugin)",
    )
}

/// Checks the PID namespace. A process can open another process's GPU memory only if it sees that process.
fn sharing(subject: &Subject) -> Finding {
    const CHECK: &str = "GPU memory sharing";
    match subject.files.link("proc/self/ns/pid") {
        Some(namespace) if namespace != FIRST_NAMESPACE => note(
            CHECK,
            "this process has a PID namespace of its own: it cannot map GPU memory of engines outside of it",
            "for the GPU lane, share the PID namespace with the engines (hostPID, or shareProcessNamespace in one pod)",
        ),
        _ => ok(CHECK, "this process can map GPU memory of engines on this host"),
    }
}

/// Checks the PCIe links: copies cannot be faster than the bus.
fn links(subject: &Subject) -> Finding {
    const CHECK: &str = "GPU link";
    let mut seen = Vec::new();
    for gpu in &subject.config.gpus {
        let attribute = |name| subject.files.text(&format!("sys/bus/pci/devices/{}/{name}", gpu.pci));
        let (width, widest) = (attribute("current_link_width"), attribute("max_link_width"));
        // The speed falls while a GPU has nothing to do; the width does not.
        if let (Some(width), Some(widest)) = (&width, &widest)
            && width != widest
        {
            return note(
                CHECK,
                format!("GPU {} has {width} of {widest} PCIe lanes", gpu.pci),
                "seat the GPU in a slot with all its lanes: with fewer, copies are slower in proportion",
            );
        }
        if let (Some(width), Some(speed)) = (width, attribute("max_link_speed")) {
            seen.push(format!("{} x{width} at {speed}", gpu.pci));
        }
    }
    if seen.is_empty() { ok(CHECK, "the system does not say") } else { ok(CHECK, seen.join(", ")) }
}

/// The driver's major version, from the first number with a dot after it: `580.159.04`.
fn major(line: &str) -> Option<u32> {
    line.split(' ').find_map(|word| word.split_once('.')?.0.parse().ok())
}

const VERSION: &str = "proc/driver/nvidia/version";
const OLDEST: u32 = 580;
const DEVICES: [&str; 2] = ["dev/nvidiactl", "dev/nvidia-uvm"];

/// The PID namespace of the host (`PROC_PID_INIT_INO` of the kernel).
const FIRST_NAMESPACE: &str = "pid:[4026531836]";
