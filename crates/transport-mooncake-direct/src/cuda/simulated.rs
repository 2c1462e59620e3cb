//! What the kernels do, for simulated devices: by the layouts that the device code has, so that it is
//! a check of what the kernels are told, not of the device code.

use std::sync::Arc;

use capture_arena::cuda::{
    CudaResult, DevicePtr, KernelArg, Launch,
    scripted::{ScriptedCuda, SimulatedMemory},
};
use control_proto::capture::Mixsum;

/// Teaches a simulated device this crate's kernels.
pub fn simulate_kernels(cuda: &ScriptedCuda) {
    let inline = |memory: &mut SimulatedMemory<'_>, args: &[KernelArg<'_>], pieces: usize| {
        let [KernelArg::Bytes(list)] = args else { panic!("not one structure: {args:?}") };
        assert_eq!(list.len(), 40 + pieces * 24);
        let (head, list) = list.split_at(40);
        gather(memory, head, list)
    };
    for (name, pieces) in
        [("gather_inline_8", 8), ("gather_inline_168", 168), ("gather_inline_1360", 1360)]
    {
        cuda.kernel(name, Arc::new(move |memory, _, args| inline(memory, args, pieces)));
    }
    cuda.kernel(
        "gather_list",
        Arc::new(|memory, _, args| {
            let [KernelArg::Bytes(head), KernelArg::U64(list)] = args else {
                panic!("not a head and an address: {args:?}")
            };
            let count = word(head, 3) & 0xffff_ffff;
            let list = memory.read(DevicePtr(*list), count * 24)?;
            gather(memory, head, &list)
        }),
    );
    cuda.kernel("write_synthetic", Arc::new(|memory, _, args| write_synthetic(memory, args)));
    cuda.kernel("sum_mixed", Arc::new(sum_mixed));
}

fn write_synthetic(memory: &mut SimulatedMemory<'_>, args: &[KernelArg<'_>]) -> CudaResult<()> {
    let [KernelArg::U64(at), KernelArg::U64(len), KernelArg::U64(counter)] = *args else {
        panic!("not an address, a length and a counter: {args:?}")
    };
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    assert!(at.is_multiple_of(16) && len > 0);
    let four_bfloat16 = |number: u64| {
        let z = counter.wrapping_add(number.wrapping_mul(GAMMA));
        let z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        ((z ^ (z >> 32)) & 0x80ff_80ff_80ff_80ff) | 0x3e00_3e00_3e00_3e00
    };
    let mut bytes: Vec<u8> =
        (1..=len.div_ceil(8)).flat_map(|number| four_bfloat16(number).to_le_bytes()).collect();
    bytes.truncate(len as usize);
    memory.write(DevicePtr(at), &bytes)
}

fn sum_mixed(
    memory: &mut SimulatedMemory<'_>,
    launch: Launch,
    args: &[KernelArg<'_>],
) -> CudaResult<()> {
    let [KernelArg::Bytes(pieces)] = args else { panic!("not one structure: {args:?}") };
    assert_eq!(pieces.len(), 40 + 64 * 16);
    let (sums, found, done) = (word(pieces, 0), word(pieces, 2), word(pieces, 3));
    let (count, ticket) = (word(pieces, 4) & 0xffff_ffff, (word(pieces, 4) >> 32) as u32);
    assert_eq!(u64::from(launch.grid[1]), count);
    assert_eq!(memory.read(DevicePtr(word(pieces, 1)), 4)?, [0; 4], "no block is done before");
    for piece in 0..count {
        let at = 5 + 2 * piece as usize;
        let (at, len) = (word(pieces, at), word(pieces, at + 1));
        let sum = match len {
            0 => 0,
            _ => Mixsum::of(&memory.read(DevicePtr(at), len)?),
        };
        assert_eq!(memory.read(DevicePtr(sums).offset(8 * piece), 8)?, [0; 8]);
        memory.write(DevicePtr(found).offset(8 * piece), &sum.to_ne_bytes())?;
    }
    memory.write(DevicePtr(done), &ticket.to_ne_bytes())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at * 8..][..8].try_into().unwrap())
}

fn gather(memory: &mut SimulatedMemory<'_>, head: &[u8], list: &[u8]) -> CudaResult<()> {
    assert_eq!(head.len(), 40);
    let (units, blocks, done) = (word(head, 0), word(head, 1), word(head, 2));
    let (count, chunk) = (word(head, 3) & 0xffff_ffff, word(head, 3) >> 32);
    assert!(chunk > 0);
    let place = |i: u64| if i < count { word(list, i as usize * 3 + 2) } else { units << 9 };
    for i in 0..count {
        let (src, dst) = (word(list, i as usize * 3), word(list, i as usize * 3 + 1));
        let len = (place(i + 1) & !511) - (place(i) & !511) - (place(i) & 511);
        memory.copy(DevicePtr(dst), DevicePtr(src), len)?;
    }
    if done != 0 {
        assert_eq!(memory.read(DevicePtr(blocks), 4)?, [0; 4]);
        memory.write(DevicePtr(done), &(word(head, 4) as u32).to_le_bytes())?;
    }
    Ok(())
}
