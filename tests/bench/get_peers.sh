#!/bin/sh
# Get the newest Redis and NATS servers of Debian into peers/bin of the current directory, for the PATH of `make bench`. The
# script installs nothing and starts no service. Redis runs with the libc that it was built for.
set -eu

debian=https://deb.debian.org/debian
mkdir -p peers/bin && cd peers
get() {  # SUITE PACKAGE …: unpack Debian packages into the folder "root"
  curl -fsS $debian/dists/$1/main/binary-amd64/Packages.xz | xzcat > index && shift
  for name in "$@"; do
    file=$(awk -v RS= -v name=$name '$2 == name' index | sed -n 's/^Filename: //p')
    curl -fsS $debian/$file -o package.deb && dpkg -x package.deb root
  done
}
get experimental redis-server redis-tools
get sid nats-server libatomic1 libc6 libgcc-s1 libjemalloc2 liblzf1 libssl3t64 \
  libstdc++6 libsystemd0 libzstd1 zlib1g
ln -s ../root/usr/sbin/nats-server bin/
lib=$PWD/root/usr/lib/x86_64-linux-gnu
echo "#!/bin/sh
exec $lib/ld-linux-x86-64.so.2 --library-path $lib --argv0 redis-server \
  $PWD/root/usr/bin/redis-check-rdb \"\$@\"" > bin/redis-server
chmod +x bin/redis-server
