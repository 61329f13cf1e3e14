// What a probe says.  Standard output is lines of a key and a value; arrays go to little-endian files in the folder
// that the first argument names, each announced by a line `file NAME BYTES`.  The last line is the verdict.
// Exit status: 0 PASS, 1 FAIL, 3 could not run.
#pragma once

#include <cstdio>
#include <ctime>
#include <string>
#include <vector>
#ifndef _WIN32
#include <unistd.h>
#endif

#include "portable.cuh"

[[noreturn]] inline void cannot_run(const std::string& why) {
  std::fprintf(stderr, "cannot run: %s\n", why.c_str());
  std::exit(3);
}

#ifdef __CUDACC__
inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cannot_run(std::string(what) + ": " + cudaGetErrorString(status));
}

template <class T>
T* on_device(const std::vector<T>& host) {
  T* device = nullptr;
  check(cudaMalloc(&device, host.size() * sizeof(T) + 1), "cudaMalloc");
  check(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
  return device;
}

template <class T>
void from_device(std::vector<T>& host, const T* device) {
  check(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
}
#else
template <class T>
T* on_device(const std::vector<T>& host) {
  return (new std::vector<T>(host))->data();
}

template <class T>
void from_device(std::vector<T>& host, const T* device) {
  std::memcpy(host.data(), device, host.size() * sizeof(T));
}
#endif

class Report {
 public:
  Report(const char* probe, int argc, char** argv) : arguments_(argv, argv + argc), start_(now()) {
    if (argc < 2) cannot_run(std::string("usage: ") + argv[0] + " FOLDER [key=value ...]");
    say("probe %s", probe);
    static std::string fault;
    fault = text("fault", "");
    planted_fault() = fault.c_str();
#ifdef _WIN32
#else
    alarm(static_cast<unsigned>(number("limit", 600)));  // an orphan of a killed driver does not live on
#endif
#ifdef __CUDACC__
    if (!fault.empty()) cannot_run("a fault can be planted in the simulation only");
    cudaDeviceProp device;
    int driver = 0, runtime = 0;
    check(cudaGetDeviceProperties(&device, 0), "reading the device");
    check(cudaDriverGetVersion(&driver), "reading the driver's version");
    check(cudaRuntimeGetVersion(&runtime), "reading the runtime's version");
    say("device %s", device.name);
    say("capability %d.%d", device.major, device.minor);
    say("driver CUDA %d.%d", driver / 1000, driver % 1000 / 10);
    say("runtime CUDA %d.%d", runtime / 1000, runtime % 1000 / 10);
#else
    say("device simulated");
#endif
  }

  template <class... Values>
  void say(const char* format, Values... values) {
    std::printf(format, values...);
    std::printf("\n");
    std::fflush(stdout);
  }
  void say(const char* line) { say("%s", line); }

  std::string folder() const { return arguments_[1]; }

  std::string text(const std::string& key, const std::string& otherwise) const {
    for (size_t i = 2; i < arguments_.size(); ++i)
      if (arguments_[i].compare(0, key.size() + 1, key + "=") == 0) return arguments_[i].substr(key.size() + 1);
    return otherwise;
  }

  uint64_t number(const std::string& key, uint64_t otherwise) const {
    const std::string given = text(key, "");
    return given.empty() ? otherwise : std::strtoull(given.c_str(), nullptr, 0);
  }

  template <class T>
  void file(const char* name, const std::vector<T>& data) {
    const std::string path = folder() + "/" + name;
    FILE* stream = std::fopen(path.c_str(), "wb");
    if (!stream) cannot_run("cannot write " + path);
    const size_t written = std::fwrite(data.data(), sizeof(T), data.size(), stream);
    if (std::fclose(stream) != 0 || written != data.size()) cannot_run("cannot write all of " + path);
    say("file %s %zu", name, data.size() * sizeof(T));
  }

  template <class T>
  std::vector<T> read(const char* name) const {
    const std::string path = folder() + "/" + name;
    FILE* stream = std::fopen(path.c_str(), "rb");
    if (!stream) cannot_run("cannot read " + path);
    std::vector<T> data;
    T item;
    while (std::fread(&item, sizeof(T), 1, stream) == 1) data.push_back(item);
    std::fclose(stream);
    return data;
  }

  int verdict(unsigned long long compared, unsigned long long different) {
    say("compared %llu", compared);
    say("different %llu", different);
    say("seconds %.3f", now() - start_);
    say(different ? "verdict FAIL" : "verdict PASS");
    return different ? 1 : 0;
  }

 private:
  static double now() {
    timespec t;
    timespec_get(&t, TIME_UTC);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }

  std::vector<std::string> arguments_;
  double start_;
};
