use kvist_cuda::{
    Compiler, Installation,
    kernels::{self, Target},
};
use kvist_gpu::{Form, Kernel};
fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let dim: u32 = a[2].parse().unwrap();
    let k = Form::new(a[0].parse().unwrap(), dim).unwrap();
    let v = Form::new(a[1].parse::<kvist_device::Storage>().unwrap().for_values(), dim).unwrap();
    let kernel = Kernel::Attend { k, v, dim, rows: a[3].parse().unwrap(), recent: a[4] == "1" };
    let target = Target { max_shared_bytes: 227 << 10, fast: true };
    println!("fast {} shared {:?}", target.is_fast(&kernel), target.shared_bytes(&kernel));
    let source = target.source(&kernel);
    std::fs::write("/tmp/k.cu", &source).unwrap();
    let c = Compiler::new(&Installation::of_system(), (9, 0), i32::MAX).unwrap();
    let (image, log) =
        c.compile(kernels::function(&kernel), &source, &["--ptxas-options=--verbose"]).unwrap_or_else(|e| {
            println!("{e}");
            std::process::exit(1)
        });
    std::fs::write("/tmp/k.cubin", image).unwrap();
    println!("{log}");
}
