//! `kvist devices`: what `--backend` can name on this machine.
use crate::{json, output};
use serde::Serialize;

#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// `kvist devices --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    /// Whether this program was built with GPUs.
    gpus: bool,
    /// Why CUDA shows no GPUs, if this program was built with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_cuda: Option<String>,
    devices: Vec<Device>,
}

#[derive(Serialize)]
struct Device {
    /// What `--backend` takes.
    backend: String,
    name: String,
    /// Null for the CPU and for CUDA.
    adapter: Option<Adapter>,
    /// Of a GPU through CUDA.
    #[serde(skip_serializing_if = "Option::is_none")]
    cuda: Option<Cuda>,
}

/// A GPU through CUDA.
#[derive(Serialize)]
struct Cuda {
    /// As 9.0.
    compute_capability: String,
    total_bytes: u64,
    /// Null if the driver does not say so now.
    free_bytes: Option<u64>,
    multiprocessors: i32,
    max_shared_bytes: u32,
    /// Why it cannot run models.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

/// An adapter of wgpu.
#[derive(Serialize)]
struct Adapter {
    api: &'static str,
    kind: &'static str,
    driver: String,
    /// Its memory, or the part of the host's that it can use. Null if its driver does not say so (Metal, DirectX 12).
    total_bytes: Option<u64>,
    /// Null if its driver does not say so.
    free_bytes: Option<u64>,
    /// The largest piece of memory that a kernel can read.
    max_binding_bytes: u64,
    max_workgroup_bytes: u32,
    subgroup_min: u32,
    subgroup_max: u32,
    features: Vec<&'static str>,
    /// Why it cannot run models.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
}

/// The NVIDIA GPUs, and why there are none.
#[cfg(feature = "cuda")]
fn nvidia() -> (Vec<Device>, Option<String>) {
    use kvist_engine::devices::{CudaInstallation, CudaSummary, cuda_devices};
    let device = |found: CudaSummary| Device {
        backend: format!("cuda:{}", found.index),
        name: found.name,
        adapter: None,
        cuda: Some(Cuda {
            compute_capability: format!("{}.{}", found.compute_capability.0, found.compute_capability.1),
            total_bytes: found.total_bytes,
            free_bytes: found.free_bytes,
            multiprocessors: found.multiprocessors,
            max_shared_bytes: found.max_shared_bytes,
            why_not: found.missing,
        }),
    };
    match cuda_devices(&CudaInstallation::of_system()) {
        Ok(found) => (found.into_iter().map(device).collect(), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    }
}
#[cfg(not(feature = "cuda"))]
fn nvidia() -> (Vec<Device>, Option<String>) {
    (Vec::new(), None)
}

#[cfg(feature = "wgpu")]
fn gpus() -> Vec<Device> {
    let device = |found: kvist_engine::devices::AdapterSummary| Device {
        backend: format!("wgpu:{}", found.index),
        name: found.name,
        adapter: Some(Adapter {
            api: found.api,
            kind: found.kind,
            driver: found.driver,
            total_bytes: found.memory.map(|memory| memory.total_bytes),
            free_bytes: found.memory.and_then(|memory| memory.free_bytes),
            max_binding_bytes: found.max_binding_bytes,
            max_workgroup_bytes: found.max_workgroup_bytes,
            subgroup_min: found.subgroup.0,
            subgroup_max: found.subgroup.1,
            features: found.features,
            why_not: found.missing,
        }),
        cuda: None,
    };
    kvist_engine::devices::adapters().into_iter().map(device).collect()
}
#[cfg(not(feature = "wgpu"))]
fn gpus() -> Vec<Device> {
    Vec::new()
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let isa = kvist_cpu::arch::Isa::best();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu =
        Device { backend: "cpu".into(), name: format!("{isa}, {threads} cores"), adapter: None, cuda: None };
    let (nvidia, no_cuda) = nvidia();
    let devices = std::iter::once(cpu).chain(gpus()).chain(nvidia).collect();
    let report = Report { version: json::VERSION, gpus: cfg!(feature = "wgpu"), devices, no_cuda };
    if args.json { output::show_json(&report) } else { output::show(&report.text()) }
}

/// `24.0 GB of memory, 23.1 GB of them free`
fn memory_text(total_bytes: Option<u64>, free_bytes: Option<u64>) -> String {
    let bytes = kvist_device::Bytes;
    let Some(total) = total_bytes else { return "how much memory it has is unknown: give --memory".into() };
    let free = free_bytes.map_or(String::new(), |free| format!(", {} of them free", bytes(free)));
    format!("{} of memory{free}", bytes(total))
}

impl Cuda {
    fn text(&self) -> String {
        let bytes = kvist_device::Bytes;
        let mut text = format!(
            "         CUDA, compute capability {}, {}; {} multiprocessors, {} of shared memory\n",
            self.compute_capability,
            memory_text(Some(self.total_bytes), self.free_bytes),
            self.multiprocessors,
            bytes(self.max_shared_bytes.into())
        );
        if let Some(why_not) = &self.why_not {
            text += &format!("         cannot run models: {why_not}\n");
        }
        text
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = String::new();
        for Device { backend, name, adapter, cuda } in &self.devices {
            text += &format!("{backend:<8} {name}\n");
            if let Some(cuda) = cuda {
                text += &cuda.text();
            }
            let Some(a) = adapter else { continue };
            text += &format!("         {}, {}, {}\n", a.kind, a.api, a.driver);
            text += &format!("         {}\n", memory_text(a.total_bytes, a.free_bytes));
            text += &format!(
                "         buffers up to {}, {} of workgroup memory, subgroups of {} to {}; {}\n",
                kvist_device::Bytes(a.max_binding_bytes),
                kvist_device::Bytes(a.max_workgroup_bytes.into()),
                a.subgroup_min,
                a.subgroup_max,
                a.features.join(", ")
            );
            if let Some(why_not) = &a.why_not {
                text += &format!("         cannot run models: {why_not}\n");
            }
        }
        if let Some(why) = &self.no_cuda {
            text += &format!("No GPU through CUDA: {why}.\n");
        }
        if !self.gpus {
            text += "This program was built without GPUs: build it with `--features wgpu`.\n";
        } else if self.devices.iter().all(|device| device.adapter.is_none()) {
            text += "No GPU was found. Install a driver with Vulkan; Debian's mesa-vulkan-drivers also has lavapipe, which \
                     runs on the CPU.\n";
        }
        text
    }
}
