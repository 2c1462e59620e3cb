//! Every step of making an arena fails once: nothing is left behind, and the error says enough.

use capture_arena::cuda::{
    ArenaKind, ArenaPeers, CudaError, DeviceArenaConfig, DeviceBlock, scripted::Machine,
};
use transport_core::ErrorKind;

use crate::machine;

const MIB: u64 = 1 << 20;

/// Calls that making memory of a kind needs.
fn calls(kind: ArenaKind) -> &'static [&'static str] {
    match kind {
        ArenaKind::Plain => {
            &["cuMemAlloc", "cuIpcGetMemHandle", "cuStreamCreate", "cuMemsetD8Async", "work"]
        }
        _ => &[
            "cuMemGetAllocationGranularity",
            "cuMemCreate",
            "cuMemExportToShareableHandle",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess",
            "cuStreamCreate",
            "cuMemsetD8Async",
            "cuStreamSynchronize",
            "work",
        ],
    }
}

#[test]
fn a_failure_at_any_step_is_undone_and_explained() {
    for kind in ArenaKind::ALL {
        for call in calls(kind) {
            let (cuda, device) = machine(Machine { fabric: None, ..Machine::default() });
            device.kinds().unwrap();
            cuda.fail(call, 0, 1, 999);
            let config = DeviceArenaConfig::new(5 * MIB, ArenaPeers::Native).kinds([kind]);
            let error = DeviceBlock::create(&device, &config).unwrap_err();
            let text = error.to_string();
            for part in ["(999)", kind.name(), "Scripted GPU 0", "5.00 MiB", "free=", "step="] {
                assert!(text.contains(part), "{kind} {call}: no {part} in {text}");
            }
            assert_eq!(cuda.used(0), 0, "{kind} {call}");
            drop(device);
            assert_eq!(cuda.leaks(), Vec::<String>::new(), "{kind} {call}");
        }
    }
}

#[test]
fn out_of_memory_stays_out_of_memory_at_every_step() {
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuStreamCreate"] {
        // In the probe, and after it.
        for probed in [false, true] {
            let (cuda, device) = machine(Machine::default());
            if probed {
                device.kinds().unwrap();
            }
            // The fabric is refused before memory is asked for.
            cuda.fail(call, u64::from(call == "cuMemCreate" && !probed), u64::MAX, 2);
            let config = DeviceArenaConfig::new(8 * MIB, ArenaPeers::Native);
            let error = DeviceBlock::create(&device, &config).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{call}: {error}");
            assert_eq!(error.context("requested"), Some("8.00 MiB"));
            assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
            assert!(error.to_string().contains("1.00 GiB that are free"), "{error}");
            if probed {
                assert_eq!(cuda.calls("cuMemAlloc"), 1, "no other kind is tried");
            }
            cuda.heal();
            DeviceBlock::create(&device, &config).expect("memory has come back");
        }
    }
}

#[test]
fn an_arena_larger_than_the_device_names_what_is_free() {
    let (cuda, device) = machine(Machine { memory: 64 * MIB, ..Machine::default() });
    for peers in [ArenaPeers::Native, ArenaPeers::NvlinkIntra] {
        let error = DeviceBlock::create(&device, &DeviceArenaConfig::new(65 * MIB, peers));
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CapacityExceeded);
        assert_eq!(error.context("requested"), Some("65.00 MiB"));
        assert_eq!(error.context("free"), Some("64.00 MiB"));
        assert_eq!(error.context("device"), Some("0"));
        let absurd = DeviceBlock::create(&device, &DeviceArenaConfig::new(u64::MAX, peers));
        assert!(absurd.is_err());
    }
    assert_eq!(cuda.used(0), 0);
}

#[test]
fn third_create_fails() {
    let (cuda, device) = machine(Machine::default());
    device.kinds().unwrap();
    cuda.fail("cuMemCreate", 2, 1, CudaError::OUT_OF_MEMORY);
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Native);
    let _one = DeviceBlock::create(&device, &config).unwrap();
    let _two = DeviceBlock::create(&device, &config).unwrap();
    let third = DeviceBlock::create(&device, &config).unwrap_err();
    assert_eq!(third.kind(), ErrorKind::CapacityExceeded);
    assert_eq!(cuda.used(0), 4 * MIB, "the other two live on");
}

#[test]
fn export_refused_moves_on_only_where_that_is_allowed() {
    for code in [CudaError::NOT_PERMITTED, CudaError::NOT_SUPPORTED] {
        let (cuda, device) = machine(Machine::default());
        cuda.fail("cuMemExportToShareableHandle", 0, u64::MAX, code);
        let native = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
        assert_eq!(DeviceBlock::create(&device, &native).unwrap().kind(), ArenaKind::Plain);
        let strict = native.kinds([ArenaKind::PosixFd]);
        let error = DeviceBlock::create(&device, &strict).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("posix_fd: export returned"), "{error}");
    }
    // Anything else is no reason to take other memory.
    let (cuda, device) = machine(Machine::default());
    cuda.fail("cuMemExportToShareableHandle", 0, u64::MAX, 999);
    let native = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
    let error = DeviceBlock::create(&device, &native).unwrap_err();
    assert_eq!((error.context("kind"), error.context("step")), (Some("posix_fd"), Some("export")));
    assert_eq!(error.kind(), ErrorKind::Unexpected);
}

#[test]
fn an_import_that_fails_in_the_probe_rules_the_kind_out() {
    let (cuda, device) = machine(Machine { fabric: None, ..Machine::default() });
    // As where the fabric's daemon hands handles out and takes none.
    cuda.fail("cuMemImportFromShareableHandle", 0, 1, CudaError::NOT_PERMITTED);
    let config = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
    assert_eq!(DeviceBlock::create(&device, &config).unwrap().kind(), ArenaKind::PosixFd);
    drop(device);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn dma_buffers_where_the_driver_has_them() {
    let (_cuda, device) = machine(Machine::default());
    let config = DeviceArenaConfig::new(MIB, ArenaPeers::Rdma);
    DeviceBlock::create(&device, &config).unwrap().export_dma_buf().unwrap();
    let (_cuda, device) = machine(Machine { optional: Vec::new(), ..Machine::default() });
    let error = DeviceBlock::create(&device, &config).unwrap().export_dma_buf().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("11.7"), "{error}");
}
