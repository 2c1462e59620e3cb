//! GPUs, as the driver has them.

use std::sync::Arc;

use capture_arena::cuda::{CudaApi, Device, DeviceAttribute, Optional, Tried, driver};
use serde_json::Value;
use transport_core::Result;

use super::{Section, fields};

/// Most devices that are listed.
const DEVICES: u32 = 16;

/// The driver, every device, and what memory `device` really shares.
pub(super) fn examine(device: u32) -> Section {
    examine_with(driver(), device)
}

fn examine_with(api: Result<Arc<dyn CudaApi>>, device: u32) -> Section {
    let mut section = Section::new("gpu");
    let api = match api {
        Ok(api) => api,
        Err(error) => {
            section.fact("cuda", error.to_string());
            return section;
        }
    };
    let driver = api.driver();
    section.fact(
        "cuda",
        fields([
            ("version", format!("{}.{}", driver.version.0, driver.version.1).into()),
            ("library", driver.library.clone().into()),
            ("batch copies", driver.has(Optional::BatchCopy).into()),
            ("DMA buffers", driver.has(Optional::DmaBufExport).into()),
        ]),
    );
    let count = match api.device_count() {
        Ok(count) => count,
        Err(error) => {
            section.fact("devices", error.to_string());
            return section;
        }
    };
    section.fact("devices", count).advise_if(
        device >= count,
        "choose a device that is there: --device, CUDA_VISIBLE_DEVICES",
    );
    for ordinal in 0..count.min(DEVICES) {
        section.fact(format!("device {ordinal}"), describe(&*api, ordinal));
    }
    if device < count {
        share(&mut section, api, device);
    }
    section
}

/// What the driver says of a device without using it.
fn describe(api: &dyn CudaApi, ordinal: u32) -> Value {
    let attribute = |which| api.device_attribute(ordinal, which).ok();
    let compute = attribute(DeviceAttribute::ComputeMajor)
        .zip(attribute(DeviceAttribute::ComputeMinor))
        .map(|(major, minor)| format!("{major}.{minor}"));
    let uuid = api.device_uuid(ordinal).ok();
    let uuid = uuid.map(|uuid| uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    fields([
        ("name", api.device_name(ordinal).ok().into()),
        ("uuid", uuid.into()),
        ("compute", compute.into()),
        ("multiprocessors", attribute(DeviceAttribute::Multiprocessors).into()),
    ])
}

/// Memory of one device, and the kinds of it that can be shared, found out by doing it.
fn share(section: &mut Section, api: Arc<dyn CudaApi>, ordinal: u32) {
    let opened = match Device::open(api, ordinal) {
        Ok(device) => device,
        Err(error) => {
            let advice = "end what else uses it, or choose another one with --device";
            section.fact("memory", error.to_string()).advise_if(true, advice);
            return;
        }
    };
    match opened.memory() {
        Ok(memory) => section.fact(
            "memory",
            fields([("free_bytes", memory.free.into()), ("total_bytes", memory.total.into())]),
        ),
        Err(error) => section.fact("memory", error.to_string()),
    };
    let probe = match opened.kinds() {
        Ok(probe) => probe,
        Err(error) => {
            section.fact("shared memory", error.to_string());
            return;
        }
    };
    for (kind, tried) in &probe.kinds {
        let found = match tried {
            Tried::Works { rdma: true } => "works, also for network cards".to_owned(),
            Tried::Works { rdma: false } => "works".to_owned(),
            Tried::Refused { step, error } => format!("refused: {step} returned {error}"),
            Tried::Failed { step, error } => format!("failed: {step} returned {error}"),
        };
        section.fact(format!("memory {kind}"), found);
    }
    section.fact("IMEX channel", probe.has_imex_channel);
}

#[cfg(test)]
mod tests {
    use capture_arena::cuda::{
        CudaError,
        scripted::{Machine, ScriptedCuda},
    };
    use transport_core::{Error, ErrorKind};

    use super::*;

    fn text(section: &Section) -> String {
        serde_json::to_string(section).unwrap()
    }

    #[test]
    fn a_device_is_described_and_tried() {
        let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
        let found = text(&examine_with(Ok(cuda.clone()), 1));
        for part in [
            "Scripted GPU 0",
            "Scripted GPU 1",
            "\"version\":\"13.0\"",
            "\"compute\":\"9.0\"",
            "total_bytes",
            "memory plain\",\"value\":\"works",
            "memory fabric\",\"value\":\"refused: create returned",
        ] {
            assert!(found.contains(part), "{part}: {found}");
        }
        assert_eq!(cuda.leaks(), Vec::<String>::new());
        assert!(text(&examine_with(Ok(cuda), 2)).contains("choose a device that is there"));
    }

    #[test]
    fn what_does_not_work_is_said() {
        let none = Error::new(ErrorKind::Unsupported, "load CUDA driver", "no CUDA driver");
        assert!(text(&examine_with(Err(none), 0)).contains("no CUDA driver"));
        let cuda = ScriptedCuda::new(Machine::default());
        cuda.fail("cuDevicePrimaryCtxRetain", 0, 1, CudaError::OUT_OF_MEMORY);
        let found = text(&examine_with(Ok(cuda), 0));
        assert!(found.contains("end what else uses it"), "{found}");
    }
}
