//! Compares what the trainer read with checksums made where it was filled, where it lies.

use std::collections::BTreeMap;

use control_proto::capture::{Checksum, ChecksumKind};
use transport_core::{Error, ErrorKind, Fetched, RegionSlice, Result};

use super::messages::Job;
use crate::{config::Config, manifest::sha256_hex, source::checksum};

/// Compares samples; tensors on a device are summed up there. Threads may share it.
#[derive(Debug)]
pub(super) struct Checker {
    #[cfg(feature = "cuda")]
    device: Option<transport_mooncake_direct::cuda::DeviceTensors>,
}

impl Checker {
    /// One for what may also lie on [`Config::device`], if anything does.
    pub(super) fn new(config: &Config, on_device: bool) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            use capture_arena::cuda::{Device, driver};
            use transport_mooncake_direct::cuda::DeviceTensors;

            let open = || DeviceTensors::load(&Device::open(driver()?, config.device)?);
            let device = on_device.then(open).transpose()?;
            Ok(Self { device })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (config, on_device); // no build without devices receives on one
            Ok(Self {})
        }
    }

    /// Bytes compared, and the tensors that differ.
    pub(super) fn compare(&self, job: &Job, fetched: &Fetched) -> Result<(u64, Vec<String>)> {
        let mut bytes = 0;
        let mut differing = Vec::new();
        let made = self.sums_on_device(fetched)?;
        for ((name, tensor), made) in fetched.tensors.iter().zip(made) {
            let key = || fetched.descriptor.sample.object(name).to_string();
            let sum = |sums: &Option<BTreeMap<String, String>>| {
                sums.as_ref()?.get(name.as_str()).cloned()
            };
            let expected = sum(&job.checksums).map(|sum| sum.parse::<Checksum>()).transpose()?;
            // Only the host makes these; what was on its way to a device was compared before.
            let sha256 = sum(&job.sha256).filter(|_| made.is_none());
            if expected.is_none() && sha256.is_none() {
                let why = "a tensor came without checksum";
                return Err(Error::new(ErrorKind::NotFound, "compare", why)
                    .with("key", key())
                    .remedy(
                        "the server must answer x-featurestore-checksums; or give --no-verify",
                    ));
            }
            let same = match made {
                Some(made) => expected == Some(Checksum::new(ChecksumKind::Mixsum, made)),
                None => {
                    let found = host_bytes(&tensor.data)?;
                    expected.is_none_or(|sum| sum == checksum(sum.kind, found))
                        && sha256.is_none_or(|sum| sum == sha256_hex(found))
                }
            };
            bytes += tensor.data.len() as u64;
            if !same {
                differing.push(key());
            }
        }
        Ok((bytes, differing))
    }

    /// The sums of those of a sample's tensors that lie on a device. No byte comes to the host.
    fn sums_on_device(&self, fetched: &Fetched) -> Result<Vec<Option<u64>>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            use std::time::{Duration, Instant};

            /// Longest time for one sample: a device that needs more is stuck.
            const BOUND: Duration = Duration::from_secs(30);
            let lies_there = |data: &RegionSlice| !data.kind().is_host();
            let all = || fetched.tensors.values().map(|tensor| &tensor.data);
            let tensors: Vec<_> = all().filter(|data| lies_there(data)).cloned().collect();
            let mut sums = device.sums(&tensors, Instant::now() + BOUND)?.into_iter();
            return Ok(all()
                .map(|data| if lies_there(data) { sums.next() } else { None })
                .collect());
        }
        Ok(vec![None; fetched.tensors.len()])
    }
}

fn host_bytes(data: &RegionSlice) -> Result<&[u8]> {
    data.as_bytes().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "compare", "a tensor is not in host memory")
    })
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use std::sync::Arc;

    use capture_arena::{
        Backing, RegionPool,
        cuda::{
            ArenaPeers, Device, DeviceArenaConfig, DevicePtr,
            scripted::{Machine, ScriptedCuda},
        },
    };
    use control_proto::capture::Mixsum;
    use indexmap::IndexMap;
    use transport_core::{
        ArenaLocation, Descriptor, Dtype, FeatureDescriptor, FeatureName, Generation, Location,
        RemoteAddr, SampleId, SampleKey, StoreId, Tensor, TensorMeta,
    };
    use transport_mooncake_direct::cuda::{DeviceTensors, simulate_kernels};

    use super::*;

    const LENS: [u64; 3] = [4099, 8, 0];

    fn fetched(cuda: &ScriptedCuda, pool: &RegionPool, bytes: &[Vec<u8>]) -> Fetched {
        let name = |i| FeatureName::new(format!("t{i}")).unwrap();
        let meta = |len: usize| TensorMeta::new(Dtype::Uint8, [len as u64]).unwrap();
        let tensor = |(i, bytes): (usize, &Vec<u8>)| {
            let region = pool.take(bytes.len()).unwrap();
            if !bytes.is_empty() {
                cuda.poke(DevicePtr(region.address() as u64), bytes);
            }
            (name(i), Tensor::new(meta(bytes.len()), region.freeze()).unwrap())
        };
        let tensors: IndexMap<_, _> = bytes.iter().enumerate().map(tensor).collect();
        let feature = |(i, bytes): (usize, &Vec<u8>)| {
            (name(i), FeatureDescriptor::new(meta(bytes.len()), Some(RemoteAddr(512)), None))
        };
        let features = bytes.iter().enumerate().map(feature).collect();
        let (store, id) = (StoreId::new("s").unwrap(), SampleId::new("a").unwrap());
        let any: transport_core::SessionName = "127.0.0.1:1".parse().unwrap();
        let place = Location::Arena(ArenaLocation::new(any.clone(), any, None));
        let key = SampleKey::new(store, id, Generation(1));
        let descriptor = Descriptor::new(key, features, None, place).unwrap();
        Fetched::new(Arc::new(descriptor), tensors, false)
    }

    #[test]
    fn tensors_on_a_device_are_compared_there() {
        let cuda = ScriptedCuda::new(Machine::default());
        simulate_kernels(&cuda);
        let device = Device::open(cuda.clone(), 0).unwrap();
        let memory = DeviceArenaConfig::new(1 << 20, ArenaPeers::Nobody);
        let pool = RegionPool::new(Backing::device(&device, &memory).unwrap()).unwrap();
        let checker = Checker { device: Some(DeviceTensors::load(&device).unwrap()) };
        let mut bytes: Vec<Vec<u8>> = LENS.iter().map(|&len| vec![7; len as usize]).collect();
        let sums = |kind: ChecksumKind, bytes: &[Vec<u8>]| {
            let sum = |bytes: &Vec<u8>| Checksum::new(kind, Mixsum::of(bytes)).to_string();
            bytes.iter().enumerate().map(|(i, b)| (format!("t{i}"), sum(b))).collect()
        };
        let mut job = Job { checksums: Some(sums(ChecksumKind::Mixsum, &bytes)), sha256: None };
        let same = fetched(&cuda, &pool, &bytes);
        assert_eq!(checker.compare(&job, &same).unwrap(), (4107, Vec::new()));
        bytes[0][4098] ^= 1;
        let other = fetched(&cuda, &pool, &bytes);
        assert_eq!(checker.compare(&job, &other).unwrap(), (4107, vec!["s/a/g1/t0".to_owned()]));

        // Each tensor where it lies, whatever else the sample has.
        let mut mixed = fetched(&cuda, &pool, &bytes);
        let host = RegionSlice::copy_of(&bytes[1]);
        mixed.tensors[1] = Tensor::new(mixed.tensors[1].meta.clone(), host).unwrap();
        job.checksums = Some(sums(ChecksumKind::Mixsum, &bytes));
        job.sha256 = Some([("t1".to_owned(), sha256_hex(&bytes[1]))].into());
        assert_eq!(checker.compare(&job, &mixed).unwrap(), (4107, Vec::new()));
        job.sha256 = Some([("t1".to_owned(), sha256_hex(b"other"))].into());
        assert_eq!(checker.compare(&job, &mixed).unwrap().1, ["s/a/g1/t1"]);
        job.sha256 = None;

        // One that no device makes is no proof.
        job.checksums = Some(sums(ChecksumKind::Xxh3, &bytes));
        assert_eq!(checker.compare(&job, &other).unwrap().1.len(), 3);
        job.checksums = None;
        assert!(
            checker.compare(&job, &other).unwrap_err().to_string().contains("without checksum")
        );
        let blind = Checker { device: None };
        job.checksums = Some(sums(ChecksumKind::Mixsum, &bytes));
        let error = blind.compare(&job, &other).unwrap_err().to_string();
        assert!(error.contains("not in host memory"), "{error}");
    }
}
