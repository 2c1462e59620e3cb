//! Memory of other processes. Two stand-ins of one process are strangers as two processes are.

use std::{os::fd::AsFd, sync::Arc};

use capture_arena::cuda::{
    Access, ArenaKind, ArenaPeers, Device, DeviceArenaConfig, DeviceBlock, PeerMemory,
    scripted::{Machine, ScriptedCuda},
};
use transport_core::ErrorKind;

use crate::machine;

const MIB: u64 = 1 << 20;

fn block(device: &Device, kind: ArenaKind) -> DeviceBlock {
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Native).kinds([kind]);
    DeviceBlock::create(device, &config).unwrap()
}

fn open(
    device: &Device,
    block: &DeviceBlock,
    access: Access,
) -> transport_core::Result<PeerMemory> {
    match block.kind() {
        ArenaKind::Fabric => {
            PeerMemory::import_fabric(device, block.handle().unwrap(), block.len(), access)
        }
        ArenaKind::PosixFd => {
            PeerMemory::import_fd(device, block.export_fd()?.as_fd(), block.len(), access)
        }
        _ => PeerMemory::open_ipc(device, block.handle().unwrap()),
    }
}

fn two_machines() -> ((Arc<ScriptedCuda>, Device), (Arc<ScriptedCuda>, Device)) {
    let like = Machine { fabric: None, ..Machine::default() };
    (machine(like.clone()), machine(like))
}

#[test]
fn every_kind_is_read_by_another_process() {
    for kind in ArenaKind::ALL {
        let ((owner, device), (reader, reading)) = two_machines();
        let memory = block(&device, kind);
        let bytes: Vec<u8> = (0..1000).map(|i| (i % 251) as u8).collect();
        owner.poke(memory.address().offset(MIB), &bytes);
        let peer = open(&reading, &memory, Access::Read).unwrap();
        assert_eq!((peer.len(), peer.device()), (2 * MIB, &reading));
        assert_ne!(peer.address(), memory.address());
        assert_eq!(reader.peek(peer.range(MIB, 1000).unwrap(), 1000), bytes, "{kind}");
        assert_eq!(peer.range(MIB, MIB), Some(peer.address().offset(MIB)));
        assert_eq!(peer.range(MIB, MIB + 1), None, "one past the end");
        assert_eq!(peer.range(u64::MAX, 2), None);
        // What the owner writes later is seen; its memory outlives it for whoever has it open.
        owner.poke(memory.address(), &[9]);
        drop((memory, device));
        assert_eq!(reader.peek(peer.address(), 1), [9]);
        drop((peer, reading));
        assert_eq!(owner.leaks(), Vec::<String>::new(), "{kind}");
        assert_eq!(reader.leaks(), Vec::<String>::new(), "{kind}");
    }
}

#[test]
fn read_only_is_read_only() {
    for kind in [ArenaKind::Fabric, ArenaKind::PosixFd] {
        let ((_owner, device), (_reader, reading)) = two_machines();
        let memory = block(&device, kind);
        let peer = open(&reading, &memory, Access::Read).unwrap();
        let stream = reading.stream().unwrap();
        // SAFETY: mapped until the end of the test.
        unsafe { stream.fill(peer.address(), 1, 8) }.unwrap();
        let error = stream.synchronize().unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        assert_eq!(peer.access(), Access::Read);
    }
}

#[test]
fn handles_of_what_is_gone_say_so() {
    for kind in [ArenaKind::Fabric, ArenaKind::Plain] {
        let ((_owner, device), (reader, reading)) = two_machines();
        let memory = block(&device, kind);
        let handle = *memory.handle().unwrap();
        drop(memory);
        let error = match kind {
            ArenaKind::Plain => PeerMemory::open_ipc(&reading, &handle),
            _ => PeerMemory::import_fabric(&reading, &handle, 2 * MIB, Access::Read),
        };
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert!(error.to_string().contains("CUDA_ERROR_"), "{error}");
        drop(reading);
        assert_eq!(reader.leaks(), Vec::<String>::new());
    }
}

#[test]
fn own_handles_and_wrong_ones_are_refused() {
    let ((_owner, device), (_reader, reading)) = two_machines();
    let memory = block(&device, ArenaKind::Plain);
    let error = PeerMemory::open_ipc(&device, memory.handle().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("its own"), "{error}");
    // A handle of the wrong sort, and one of nothing.
    let fabric = block(&device, ArenaKind::Fabric);
    assert!(PeerMemory::open_ipc(&reading, fabric.handle().unwrap()).is_err());
    let made_up = PeerMemory::import_fabric(&reading, &[7; 64], 2 * MIB, Access::Read);
    assert!(made_up.is_err());
    // A descriptor of something else.
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = PeerMemory::import_fd(&reading, file.as_fd(), 2 * MIB, Access::Read).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn a_block_longer_than_it_is_cannot_be_mapped() {
    let ((_owner, device), (reader, reading)) = two_machines();
    let memory = block(&device, ArenaKind::PosixFd);
    let fd = memory.export_fd().unwrap();
    let longer = PeerMemory::import_fd(&reading, fd.as_fd(), 4 * MIB, Access::Read);
    assert_eq!(longer.unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(reading);
    assert_eq!(reader.leaks(), Vec::<String>::new());
}

#[test]
fn a_mapping_that_fails_half_way_is_undone() {
    for call in ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemGetAddressRange"] {
        let ((_owner, device), (reader, reading)) = two_machines();
        let kind =
            if call == "cuMemGetAddressRange" { ArenaKind::Plain } else { ArenaKind::PosixFd };
        let memory = block(&device, kind);
        reader.fail(call, 0, 1, 2);
        let error = open(&reading, &memory, Access::Read).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{call}: {error}");
        drop(reading);
        assert_eq!(reader.leaks(), Vec::<String>::new(), "{call}");
    }
}
